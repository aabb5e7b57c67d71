"""The service on Ray Serve with a real engine, real weights and a real Redis: versions, updates under load, deaths.

One Ray, one application; the tests run in order and continue from the version that the last one left.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import ray
import redis
import torch
from ray import serve
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.device_turns import LearnerTurns
from offbeat.services.errors import RetryableError
from offbeat.services.generation.app import build
from offbeat.services.generation.client import (
    BYTES_PER_TOKEN,
    DEPLOYMENT,
    MAX_MESSAGE_BYTES,
    ServeGenerationClient,
    fits_message,
)
from offbeat.services.generation.config import EngineModelArgs, EngineStrategy, GenerationConfig, VllmConfig, app_name
from offbeat.services.generation.replica import ReplicaStatus
from offbeat.services.keys import RunKeys
from offbeat.services.messages.types import Completion, GenerateRequest, Sampling
from offbeat.services.telemetry import AsyncRedisMetrics, merge_all
from offbeat.services.weights.broker import WeightBroker
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.publisher import RedisWeightPublisher
from offbeat.services.weights.transports.factory import cleanup
from offbeat.services.weights.transports.shm import SharedMemoryTransport
from tests.integration.policy_weights import (
    mismatch,
    named_tensors,
    random_policy,
    write_policy,
)
from tests.services.weights.publishing import give_lease
from tests.waiting import wait_until

pytestmark = [pytest.mark.alone, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

RUN = f"serve-{os.getpid()}"
FLOAT_NOISE = 5e-5
CONFIG = GenerationConfig(
    model_args=EngineModelArgs(dtype="float32"),
    kv_cache_gib=0.25,
    request_timeout_s=120,
    strategy_args=EngineStrategy(strategy_config=VllmConfig(enable_sleep_mode=True)),
)
WEIGHTS = WeightsConfig()
RESTART_S = 240.0


class Mesh:
    """A learner's publisher, a worker's client, and every set of weights that was published."""

    def __init__(self, server: redis.Redis, folder: Path, output_dir: Path) -> None:
        self.redis = server
        give_lease(server, RUN, 1)
        self.publisher = RedisWeightPublisher(server, RUN, WEIGHTS, 1, output_dir)
        self.policy: Any = random_policy(folder, 0)
        self.published: list[dict[str, torch.Tensor]] = []
        self._requests = 0

    @property
    def version(self) -> int:
        return len(self.published) - 1

    def publish(self, *, drop: str = "", settle: bool = True) -> int:
        """Train one step (a random one) and publish it."""
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02 * float(parameter.std().nan_to_num()))
        self.published.append({name: tensor.detach().clone() for name, tensor in named_tensors(self.policy)})
        tensors = ((name, tensor) for name, tensor in named_tensors(self.policy) if name != drop)
        self.publisher.publish(self.version, self.version, tensors)
        if settle:
            self.publisher.flush()
        return self.version

    def request(self, length: int = 40, max_new_tokens: int = 8, min_version: int = 0) -> GenerateRequest:
        self._requests += 1
        prompt = tuple((self._requests * 5 + 3 * i) % 28 + 4 for i in range(length))
        return GenerateRequest(f"q{self._requests}", prompt, Sampling(max_new_tokens=max_new_tokens), min_version)

    def mismatch(self, request: GenerateRequest, completion: Completion, span: int = 0) -> torch.Tensor:
        """[tokens of a span] against the weights of its version."""
        start, end, version = completion.versions[span]
        self.policy.load_state_dict(self.published[version], strict=False)
        try:
            return mismatch(self.policy, request, completion)[start:end]
        finally:
            self.policy.load_state_dict(self.published[-1], strict=False)


@pytest.fixture(scope="module")
def mesh(redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Two versions are published before anything is deployed."""
    folder, output_dir = write_policy(tmp_path_factory.mktemp("policy")), tmp_path_factory.mktemp("run")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir="/tmp/offbeat-gs")
    server = redis.Redis.from_url(redis_server)
    try:
        mesh = Mesh(server, folder, output_dir)
        mesh.publish()
        mesh.publish()
        app = build(
            RUN,
            CONFIG,
            WEIGHTS,
            model=folder,
            sequence_length=512,
            redis_url=redis_server,
            output_dir=output_dir,
            seed=1,
        )
        serve.run(app, name=app_name(RUN), route_prefix=None)
        yield mesh
    finally:
        serve.shutdown()
        ray.shutdown()
        cleanup(RUN, WEIGHTS, output_dir)
        keys = list(server.scan_iter(match=RunKeys(RUN).prefix + "*"))
        if keys:
            server.delete(*keys)
        server.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: Mesh) -> AsyncIterator[ServeGenerationClient]:
    assert mesh.version >= 1
    yield ServeGenerationClient(app_name(RUN))


async def generate(client: ServeGenerationClient, *requests: GenerateRequest) -> list[Completion]:
    batches = [completions async for completions in client.generate(requests)]
    return [completion for completions in batches for completion in completions]


async def status() -> ReplicaStatus:
    statuses = await serve.get_deployment_handle(DEPLOYMENT, app_name(RUN)).statuses.remote()
    return statuses[RUN]


def replica_process() -> psutil.Process:
    (process,) = [
        p for p in ray_descendants() if "ServeReplica" in " ".join(p.cmdline()) and RUN in " ".join(p.cmdline())
    ]
    return process


def ray_descendants() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


async def test_a_replica_that_starts_late_serves_the_newest_version(mesh: Mesh, client: ServeGenerationClient) -> None:
    assert (await status())["version"] == mesh.version == 1
    request = mesh.request()
    (completion,) = await generate(client, request)
    assert {span.version for span in completion.versions} == {1}
    assert mesh.mismatch(request, completion).max() < FLOAT_NOISE


async def test_a_request_for_a_version_to_come_is_held(mesh: Mesh, client: ServeGenerationClient) -> None:
    request = mesh.request(min_version=mesh.version + 1)
    held = asyncio.create_task(generate(client, request))
    await wait_until(lambda: is_waiting(1))
    assert not held.done()
    version = mesh.publish()
    (completion,) = await held
    assert completion.versions[0].version == version
    assert mesh.mismatch(request, completion).max() < FLOAT_NOISE


async def is_waiting(count: int) -> bool:
    return (await status())["waiting"] == count


async def test_every_token_is_of_its_policy_version_under_load(mesh: Mesh, client: ServeGenerationClient) -> None:
    seen: list[tuple[GenerateRequest, Completion]] = []
    published = asyncio.Event()

    async def play() -> None:
        """Short answers, several to a call, sharing prompts so that the prefix cache is used."""
        while not published.is_set():
            requests = [mesh.request(length=100, max_new_tokens=12) for _ in range(4)]
            requests += [GenerateRequest(f"{r.request_id}+", r.prompt, r.sampling) for r in requests]
            completions = {c.request_id: c for c in await generate(client, *requests)}
            seen.extend((request, completions[request.request_id]) for request in requests)

    async def train() -> None:
        """Publish a version once the one before it was sampled."""
        for _ in range(12):
            version = mesh.publish()
            await wait_until(lambda version=version: any(c.versions[-1].version == version for _, c in seen))
        published.set()

    await asyncio.gather(train(), *(play() for _ in range(4)))
    for request, completion in seen:
        assert not completion.error
        assert mesh.mismatch(request, completion).max() < FLOAT_NOISE
    assert any(len(completion.versions) > 1 for _, completion in seen), "no update met a running request"


async def test_a_turn_of_the_learner_interrupts_answers_whose_tokens_are_kept(
    mesh: Mesh, client: ServeGenerationClient
) -> None:
    """They end under the weights that were published in the turn, computed anew for the tokens of before."""
    await wait_until(lambda: serves(mesh.version))
    before = mesh.version
    turns = LearnerTurns(mesh.redis, RUN, "", 1, lease_s=2 * RESTART_S)
    for _ in range(5):
        requests = [mesh.request(max_new_tokens=400) for _ in range(8)]
        answers = asyncio.create_task(generate(client, *requests))
        await wait_until(partial(have_begun, answers))
        await generate(client, mesh.request())
        assert await asyncio.to_thread(turns.begin, lambda: False)
        assert await is_running(0)
        if not answers.done():
            break
        turns.end()  # too late for answers of a second or two
    late = asyncio.create_task(generate(client, mesh.request()))
    version = mesh.publish()
    assert not answers.done()
    turns.end()
    assert [span.version for span in (await late)[0].versions] == [version]
    completions = {completion.request_id: completion for completion in await answers}
    assert len(completions) == 8
    for request in requests:
        completion = completions[request.request_id]
        assert len(completion.token_ids) == len(completion.logprobs) == 400
        assert [span.version for span in completion.versions] == [before, version]
        assert [span.end for span in completion.versions][-1] == 400
        assert max(mesh.mismatch(request, completion, span).max() for span in (0, 1)) < FLOAT_NOISE


async def is_running(count: int) -> bool:
    return (await status())["running"] == count


async def have_begun(answers: asyncio.Task[list[Completion]]) -> bool:
    return answers.done() or await is_running(8)


async def test_the_replica_reports_what_it_did_and_the_broker_how_far_it_lags(
    mesh: Mesh, client: ServeGenerationClient, redis_server: str, tmp_path: Path
) -> None:
    assert client is not None
    async with AsyncRedis.from_url(redis_server) as connection:
        metrics = AsyncRedisMetrics(connection, RUN)
        await wait_until(lambda: serves(mesh.version))

        async def reported() -> bool:
            records = [record for _, record in await metrics.read(count=10_000) if record.source == "generation"]
            return bool(records) and records[-1].values["version"].value == mesh.version

        await wait_until(reported)
        merged = merge_all(record.values for _, record in await metrics.read(count=10_000))
        assert merged["tokens"].value > 12 * 16 * 12
        assert merged["weight_updates"].value > 5
        assert 0 < merged["pause_s"].value < 1.0
        broker = WeightBroker(connection, RUN, WEIGHTS, tmp_path)
        assert list((await broker.measure()).values()) == [0]


async def serves(version: int) -> bool:
    return (await status())["version"] == version


LONG = MAX_MESSAGE_BYTES // BYTES_PER_TOKEN + 1
"""Tokens of an answer that Ray's object store would carry."""


async def test_what_does_not_fit_a_message_travels_as_an_object(mesh: Mesh, client: ServeGenerationClient) -> None:
    await wait_until(lambda: serves(mesh.version))
    request = mesh.request(length=500, max_new_tokens=LONG)
    assert not fits_message([request], 0)
    (completion,) = await generate(client, request)
    assert len(completion.token_ids) == 12, "the context's end"
    assert mesh.mismatch(request, completion).max() < FLOAT_NOISE


@serve.deployment(name=DEPLOYMENT, ray_actor_options={"num_cpus": 0})
class ExpertsOfManyTokens:
    """Replica of a mixture: each token of prompt and answer has 384 bytes of experts, as Qwen3-30B-A3B's."""

    async def generate(self, blob: bytes, asleep: Sequence[str] = ()) -> AsyncIterator[bytes]:
        import numpy as np

        from offbeat.services.messages.codec import decode_requests, encode_completions
        from offbeat.services.messages.types import Completion, VersionSpan

        del asleep
        for request in decode_requests(blob):
            routing = np.zeros((len(request.prompt), 48, 8), dtype=np.uint8)
            yield encode_completions(
                [Completion(request.request_id, (1,), (-1.0,), (VersionSpan(0, 1, 0),), routing=routing)]
            )


async def test_experts_that_do_not_fit_a_message_travel_as_an_object(mesh: Mesh) -> None:
    """A prompt's alone are over Serve's limit of 4 MiB, which failed the call again at each retry."""
    name = f"experts-{os.getpid()}"  # without RUN, by which tests find the replica
    serve.run(ExpertsOfManyTokens.bind(), name=name, route_prefix=None)
    try:
        request = mesh.request(length=12_000)
        (completion,) = await generate(ServeGenerationClient(name, returns_routing=True), request)
        assert completion.routing is not None
        assert completion.routing.shape == (12_000, 48, 8)
    finally:
        serve.delete(name)


async def test_a_proxy_for_grpc_takes_no_calls(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which gRPC would send through it, and Serve would repeat without end."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    (completion,) = await generate(ServeGenerationClient(app_name(RUN)), mesh.request())
    assert len(completion.token_ids) == 8


@pytest.mark.parametrize("max_new_tokens", [450, LONG], ids=["message", "object"])
async def test_an_abort_and_a_caller_who_leaves_free_the_engine(
    mesh: Mesh, client: ServeGenerationClient, max_new_tokens: int
) -> None:
    requests = [mesh.request(max_new_tokens=max_new_tokens, min_version=10_000) for _ in range(2)]
    call = asyncio.create_task(generate(client, *requests))
    await wait_until(lambda: is_waiting(2))
    await client.abort([requests[0].request_id, "unknown"])
    await wait_until(lambda: is_waiting(1))
    call.cancel()
    await wait_until(lambda: is_waiting(0))
    assert (await status())["running"] == 0


async def test_damaged_weights_are_refused_and_the_next_version_is_taken(
    mesh: Mesh, client: ServeGenerationClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await wait_until(lambda: serves(mesh.version))
    good, stage = mesh.version, SharedMemoryTransport.stage

    def damage(*args: Any) -> Any:
        stored = stage(*args)
        damaged = bytearray(Path(stored.location).read_bytes())
        damaged[-100] ^= 0xFF
        Path(stored.location).write_bytes(damaged)
        return stored

    with monkeypatch.context() as patch:
        patch.setattr(SharedMemoryTransport, "stage", damage)
        mesh.publish()
    held = asyncio.create_task(generate(client, mesh.request(min_version=good + 1)))
    (completion,) = await generate(client, mesh.request())
    assert completion.versions[0].version == good
    await wait_until(lambda: is_waiting(1))
    assert await serves(good)
    version = mesh.publish()
    (completion,) = await held
    assert completion.versions[0].version == version


async def test_a_killed_replica_is_replaced_and_serves_the_newest_version(
    mesh: Mesh, client: ServeGenerationClient
) -> None:
    old = replica_process()
    engines = old.children(recursive=True)
    assert engines
    held = asyncio.create_task(generate(client, mesh.request(min_version=mesh.version + 1)))
    await wait_until(lambda: is_waiting(1))
    old.send_signal(signal.SIGKILL)
    with pytest.raises(RetryableError):
        await held
    psutil.wait_procs(engines, timeout=5)
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in engines), (
        "the engine outlived its replica"
    )
    version = mesh.publish()
    request = mesh.request(min_version=version)
    async with asyncio.timeout(RESTART_S):
        completion = await retried(client, request)
    assert completion.versions[0].version == version
    assert mesh.mismatch(request, completion).max() < FLOAT_NOISE
    assert replica_process().pid != old.pid


async def retried(client: ServeGenerationClient, request: GenerateRequest) -> Completion:
    while True:
        try:
            (completion,) = await generate(client, request)
        except RetryableError:
            await asyncio.sleep(0.5)
        else:
            return completion


async def test_weights_that_do_not_fit_take_the_replica_out_until_good_ones_come(
    mesh: Mesh, client: ServeGenerationClient
) -> None:
    old = replica_process().pid
    running = asyncio.create_task(generate(client, mesh.request(min_version=mesh.version + 2)))
    await wait_until(lambda: is_waiting(1))
    bad = mesh.publish(drop="model.layers.1.self_attn.k_proj.weight")
    with pytest.raises(RetryableError, match=f"version {bad} could not be loaded"):
        await running
    version = mesh.publish()
    request = mesh.request(min_version=bad)
    async with asyncio.timeout(RESTART_S):
        completion = await retried(client, request)
    assert completion.versions[0].version == version
    assert mesh.mismatch(request, completion).max() < FLOAT_NOISE
    assert replica_process().pid != old
