"""Weights in the learner's device memory: a replica pulls, the learner hands out, one at a time, as long as it lives."""

import json
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
import torch
from redis.backoff import NoBackoff
from redis.retry import Retry

from offbeat.services.errors import RetryableError, WeightsError
from offbeat.services.keys import RunKeys
from offbeat.services.messages.types import Manifest
from offbeat.services.redis.connection import OutageRetry
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.publisher import RedisWeightPublisher
from offbeat.services.weights.transports import device, gpu_pulls
from offbeat.services.weights.transports.device import DeviceTransport, HeldTensors, checksum
from offbeat.services.weights.transports.gpu_pulls import PullServer, TensorPull
from tests.services.weights.publishing import give_lease
from tests.waiting import wait_until_sync

pytestmark = pytest.mark.slow

RUN = "pulls"


def hand_over(held: HeldTensors, pull: TensorPull, desk: PullServer) -> None:
    """A sender that moves nothing: the ticket says what the version holds."""
    update = {"names": sorted(held), "workers": pull.workers}
    desk.answer(pull, {"init": {"port": 1}, "update": update})
    desk.wait_done(pull)


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def learner(server: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., DeviceTransport]]:
    monkeypatch.setattr(device, "PULL_POLL_S", 0.05)
    made: list[DeviceTransport] = []

    def make(sender: Callable[[HeldTensors, TensorPull, PullServer], None] = hand_over) -> DeviceTransport:
        made.append(DeviceTransport("ipc", RUN, server, sender=sender))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def replica(redis_url: str) -> Iterator[DeviceTransport]:
    with redis.Redis.from_url(redis_url) as client:
        yield DeviceTransport("ipc", RUN, client, workers=2)


def stage(transport: DeviceTransport, version: int) -> Manifest:
    copies = transport.copies([("w", torch.full((3,), float(version)))])
    stored = transport.stage(version, 1, copies)
    return Manifest(RUN, version, version, 1, transport.name, stored.location, stored.digest, stored.num_bytes, (), 0.0)


def test_a_replica_gets_a_ticket_with_the_versions_digest(
    learner: Callable[..., DeviceTransport], replica: DeviceTransport
) -> None:
    transport = learner()
    manifest = stage(transport, 0)
    for _ in range(2):
        with replica.fetch(manifest) as path:
            ticket = json.loads(path.read_text())
        assert ticket["init"] == {"port": 1}
        assert ticket["update"] == {"names": ["w"], "workers": 2, "digest": manifest.digest}
        assert not path.exists()


@pytest.mark.parametrize(("dtype", "published"), [("as_trained", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_version_is_a_copy_in_the_published_type(dtype: str, published: torch.dtype, server: redis.Redis) -> None:
    weight, index, bias = torch.tensor([[1.0, 1.001]]), torch.tensor([7]), torch.tensor([2.003])
    expected = weight.to(published, copy=True)
    copies = DeviceTransport("ipc", RUN, server, dtype=dtype).copies([("w", weight), ("i", index), ("b", bias)])
    weight.zero_()
    assert copies["w"].dtype == published
    assert (copies["i"].dtype, copies["b"].dtype) == (torch.int64, torch.float32), "routers' biases are not rounded"
    assert torch.equal(copies["w"], expected)


def test_a_version_is_readable_while_the_learner_that_holds_it_is_there(
    learner: Callable[..., DeviceTransport], replica: DeviceTransport
) -> None:
    transport = learner()
    manifest = stage(transport, 0)
    with replica.fetch(manifest):
        assert replica.readable(manifest)
        assert transport.readable(manifest)
    transport.close()
    assert not replica.readable(manifest)
    restarted = learner()
    again = stage(restarted, 0)
    with replica.fetch(again):
        assert replica.readable(again)
        assert not replica.readable(manifest)


def test_a_version_that_was_collected_is_refused(
    learner: Callable[..., DeviceTransport], replica: DeviceTransport
) -> None:
    transport = learner()
    old, new = stage(transport, 0), stage(transport, 1)
    transport.delete(old.location)
    with pytest.raises(WeightsError, match="refused version 0: it is not held any more"), replica.fetch(old):
        pass
    with replica.fetch(new) as path:
        assert isinstance(path, Path)


def test_versions_that_redis_forgot_leave_the_learners_memory(
    learner: Callable[..., DeviceTransport], server: redis.Redis, tmp_path: Path
) -> None:
    transport, keys = learner(), RunKeys(RUN)
    give_lease(server, RUN, 1)
    publisher = RedisWeightPublisher(server, RUN, WeightsConfig(transport="fs", keep_versions=2), 1, tmp_path)
    publisher._transport = transport
    for version in range(8):
        if version in (3, 6):
            server.delete(keys.manifests, keys.progress)
        publisher.publish(version, version, [("w", torch.zeros(4))])
        publisher.flush()
        assert {int(each) for each in server.hkeys(keys.manifests)} == {
            int(location.rpartition("/v")[2].split("-")[0]) for location in transport.held
        }
    publisher.close()


def test_a_replica_that_fails_does_not_keep_others_waiting(
    learner: Callable[..., DeviceTransport], replica: DeviceTransport
) -> None:
    manifest = stage(learner(), 0)
    with pytest.raises(RuntimeError, match="half loaded"), replica.fetch(manifest):
        raise RuntimeError("half loaded")
    with replica.fetch(manifest) as path:
        assert path.exists()


ASKING = """
import sys
import redis
from offbeat.services.weights.transports.gpu_pulls import open_pull

with redis.Redis.from_url(sys.argv[1]) as client, open_pull(client, sys.argv[2], 0, workers=1, timeout_s=300.0):
    print("loading", flush=True)
    sys.stdin.read()
"""


def test_a_replica_that_dies_while_it_loads_does_not_keep_others_waiting(
    learner: Callable[..., DeviceTransport],
    replica: DeviceTransport,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does one that died before it was served."""
    monkeypatch.setattr(gpu_pulls, "CHECK_INTERVAL_S", 0.2)
    manifest = stage(learner(), 0)
    command = [sys.executable, "-c", ASKING, redis_url, RUN]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as first, subprocess.Popen(command, **pipes) as second:
        assert first.stdout is not None
        assert second.stdout is not None
        ready, _, _ = select.select([first.stdout, second.stdout], [], [], 60)
        assert ready
        first.kill()
        second.kill()
    with replica.fetch(manifest) as path:
        assert path.exists()


def test_an_error_while_sending_reaches_the_replica(
    learner: Callable[..., DeviceTransport], replica: DeviceTransport
) -> None:
    def broken(held: HeldTensors, pull: TensorPull, desk: PullServer) -> None:
        raise RuntimeError(f"no peer for {len(held)} tensors of {pull.version} at {desk is not None}")

    manifest = stage(learner(broken), 0)
    with pytest.raises(WeightsError, match="no peer for 1 tensors of 0"), replica.fetch(manifest):
        pass


def test_the_checksum_depends_on_values_and_not_on_memory_layout() -> None:
    tensor = torch.randn(5, 7)
    assert checksum([("a", tensor)]) == checksum([("b", tensor.t().contiguous().t())])
    changed = tensor.clone()
    changed[2, 3] = -changed[2, 3]
    assert checksum([("a", tensor)]) != checksum([("a", changed)])
    assert checksum([("a", tensor.to(torch.bfloat16))]).startswith("sum64:")


def test_a_replica_may_load_longer_than_a_read_and_its_slot_last(
    redis_url: str, replica: DeviceTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_pulls, "HEARTBEAT_TTL_S", 5)
    monkeypatch.setattr(gpu_pulls, "CHECK_INTERVAL_S", 0.1)
    monkeypatch.setattr(device, "PULL_POLL_S", 0.1)
    outcomes: list[str] = []

    def send(held: HeldTensors, pull: TensorPull, desk: PullServer) -> None:
        outcomes.append("failed")
        hand_over(held, pull, desk)
        outcomes[:] = ["sent"]

    no_retry = Retry(NoBackoff(), 0)
    with redis.Redis.from_url(redis_url, socket_timeout=4.0, retry=no_retry) as client:
        learner = DeviceTransport("ipc", RUN, client, sender=send)
        manifest = stage(learner, 0)
        with replica.fetch(manifest):
            loaded_at = time.monotonic() + 6.0
            while time.monotonic() < loaded_at:
                assert replica.readable(manifest)
                time.sleep(0.05)
        wait_until_sync(lambda: outcomes == ["sent"])
        learner.close()


def test_a_replica_whose_redis_refuses_writes_may_ask_again(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, retry=OutageRetry(0.0)) as client:
        client.config_set("maxmemory", 1)
        try:
            with (
                pytest.raises(RetryableError, match=r"^Redis refuses writes: OOM"),
                gpu_pulls.open_pull(client, RUN, 3, workers=1, timeout_s=1.0),
            ):
                pass
        finally:
            client.config_set("maxmemory", 0)
        assert not client.keys("*pull*")


def test_a_weights_query_during_a_redis_outage_is_retryable(
    learner: Callable[..., DeviceTransport],
) -> None:
    manifest = stage(learner(), 3)
    with redis.Redis.from_url("redis://127.0.0.1:1/0", retry=OutageRetry(0.0)) as nowhere:
        replica = DeviceTransport("ipc", RUN, nowhere)
        with pytest.raises(RetryableError, match=r"^Redis does not answer: "):
            replica.readable(manifest)


def test_a_connection_to_a_replica_that_is_gone_is_given_up(
    server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits for its peer without a limit."""
    monkeypatch.setattr(gpu_pulls, "CHECK_INTERVAL_S", 0.05)
    desk, ended = PullServer(server, RUN, "token"), threading.Event()
    pull = TensorPull("one", 7, 1, time.time() + 60)
    loader = RunKeys(RUN).key("pull", pull.pull_id, "loader")
    server.set(loader, "", ex=60)
    assert desk.run_for(pull, lambda: "connected") == "connected"
    gone = threading.Timer(0.3, server.delete, [loader])
    gone.start()
    try:
        with pytest.raises(WeightsError, match="asked for version 7 is gone"):
            desk.run_for(pull, ended.wait)
        assert gpu_pulls.holder(server, RUN) == "token"
    finally:
        ended.set()
        gone.join()
        desk.leave()
