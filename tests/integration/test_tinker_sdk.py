"""Every public method of the SDK's clients against a real server: it works, or is refused with what to do instead."""

import asyncio
import inspect
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types

from offbeat.benchmarks.tinker.server import RunningServer, running_server
from tests.integration.tinker_client import ADAM, SENTENCE, adapter, are_equal, create, datum, sample, train
from tests.waiting import PATIENCE_S, wait_until_sync

KEY, OTHER_KEY = "tml-one", "tml-other"
HOUR_S = 3600
PROMPT, ONE_TOKEN = types.ModelInput.from_ints(SENTENCE[:2]), types.SamplingParams(max_tokens=1)
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings(
        "ignore:DEPRECATED:FutureWarning", "ignore::tinker.lib.experimental.ExperimentalWarning"
    ),
]


class Clients:
    """One client of each class, and checkpoints."""

    def __init__(self, url: str) -> None:
        self.service = tinker.ServiceClient(base_url=url, api_key=KEY, project_id="mine", display_name="walk")
        self.training = create(self.service)
        self.sampling = self.training.save_weights_and_get_sampling_client().result()
        self.rest = tinker.RestClient(base_url=url, api_key=KEY)
        self.admin = tinker.AdminClient(base_url=url, api_key=KEY)
        self._numbers = count()

    @property
    def name(self) -> str:
        return f"name-{next(self._numbers)}"

    @property
    def saved(self) -> str:
        """Path of a new training checkpoint."""
        return self.training.save_state(self.name).result().path

    @property
    def sampler_path(self) -> str:
        return self.training.save_weights_for_sampler(self.name).result().path

    @property
    def session_id(self) -> str:
        return self.service.holder.get_session_id()


Arguments = Callable[[Clients], tuple[Any, ...]]
DATA = [datum()]
BILLED = ("2026-07-13T00:00:00Z", "2026-07-14T00:00:00Z")


def custom(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return -torch.cat(logprobs).sum(), {}


def weighted(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/weighted:sum": loss}


def nothing(_: Clients) -> tuple[Any, ...]:
    return ()


WORKING: dict[str, Arguments] = {
    "ServiceClient.get_console_url": nothing,
    "ServiceClient.get_server_capabilities": nothing,
    "ServiceClient.create_lora_training_client": lambda _: ("tiny", 2),
    "ServiceClient.copy_weights": lambda own: (own.saved,),
    "ServiceClient.create_training_client_from_state": lambda own: (own.saved,),
    "ServiceClient.create_training_client_from_state_with_optimizer": lambda own: (own.saved,),
    "ServiceClient.create_sampling_client": lambda own: (own.sampler_path,),
    "ServiceClient.create_custom_loss": lambda _: (weighted, {"logprobs": 1, "weights": 1}),
    "ServiceClient.create_rest_client": nothing,
    "ServiceClient.get_telemetry": nothing,
    "TrainingClient.get_console_url": nothing,
    "TrainingClient.forward": lambda _: (DATA, "cross_entropy"),
    "TrainingClient.forward_backward": lambda _: (DATA, "cross_entropy"),
    "TrainingClient.forward_backward_custom": lambda _: (DATA, custom),
    "TrainingClient.optim_step": lambda _: (ADAM,),
    "TrainingClient.save_state": lambda own: (own.name, HOUR_S),
    "TrainingClient.load_state": lambda own: (own.saved,),
    "TrainingClient.load_state_with_optimizer": lambda own: (own.saved,),
    "TrainingClient.save_weights_for_sampler": lambda own: (own.name, HOUR_S),
    "TrainingClient.get_info": nothing,
    "TrainingClient.get_tokenizer": nothing,
    "TrainingClient.create_sampling_client": lambda own: (own.sampler_path,),
    "TrainingClient.save_weights_and_get_sampling_client": nothing,
    "TrainingClient.get_telemetry": nothing,
    "SamplingClient.sample": lambda _: (PROMPT, 2, ONE_TOKEN),
    "SamplingClient.compute_logprobs": lambda _: (PROMPT,),
    "SamplingClient.get_tokenizer": nothing,
    "SamplingClient.get_base_model": nothing,
    "SamplingClient.get_telemetry": nothing,
    "SamplingClient.get_sampler_handle": nothing,
    "RestClient.get_telemetry": nothing,
    "RestClient.get_server_capabilities": nothing,
    "RestClient.get_training_run": lambda own: (own.training.model_id,),
    "RestClient.get_training_run_by_tinker_path": lambda own: (own.saved,),
    "RestClient.get_weights_info_by_tinker_path": lambda own: (own.saved,),
    "RestClient.list_training_runs": nothing,
    "RestClient.list_checkpoints": lambda own: (own.training.model_id,),
    "RestClient.delete_checkpoint": lambda own: (own.training.model_id, "/".join(own.saved.split("/")[3:])),
    "RestClient.delete_checkpoint_from_tinker_path": lambda own: (own.saved,),
    "RestClient.copy_weights": lambda own: (own.saved, "any"),
    "RestClient.set_checkpoint_ttl_from_tinker_path": lambda own: (own.saved, HOUR_S),
    "RestClient.list_user_checkpoints": nothing,
    "RestClient.get_session": lambda own: (own.session_id,),
    "RestClient.list_sessions": nothing,
    "RestClient.get_sampler": lambda own: (own.sampling._sampling_session_id,),
    "RestClient.get_current_checkpoint_storage_usage": nothing,
    "AdminClient.get_telemetry": nothing,
    "AdminClient.get_current_checkpoint_storage_usage": nothing,
}
REFUSED: dict[str, tuple[Arguments, str]] = {
    "TrainingClient.save_weights_external": (lambda own: (own.name,), "save_weights_for_sampler writes a PEFT"),
    "RestClient.get_external_weights_urls": (lambda _: ("tinker://a/external_weights/b",), "have no URLs"),
    "RestClient.publish_checkpoint_from_tinker_path": (lambda own: (own.saved,), "give its owner's key"),
    "RestClient.unpublish_checkpoint_from_tinker_path": (lambda own: (own.saved,), "give its owner's key"),
    "RestClient.assign_session_project": (lambda own: (own.session_id, "mine"), "there are no projects"),
    "RestClient.export_session_trace": (lambda own: (own.session_id,), "/metrics has the times"),
    "RestClient.search_sessions": (lambda _: (types.SessionSearchRequest(),), "list_sessions lists them"),
    "RestClient.whoami": (nothing, "plain API key"),
    "RestClient.get_audit_log": (nothing, "offbeat audit MODEL"),
    "RestClient.get_billing_usage": (lambda _: BILLED, "nothing is billed"),
    "AdminClient.get_audit_log": (nothing, "offbeat audit MODEL"),
    "AdminClient.get_billing_usage": (lambda _: BILLED, "nothing is billed"),
}
ELSEWHERE = {
    "ServiceClient.holder",
    "ServiceClient.close",  # by the fixture
    "SamplingClient.create",  # by each method that returns one
    "SamplingClient.from_sampler_handle",
    "SamplingClient.on_queue_state_change",
}
CLASSES = (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient, tinker.AdminClient)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("tinker") / "run") as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="module")
def clients(server: RunningServer) -> Iterator[Clients]:
    clients = Clients(server.url)
    yield clients
    clients.service.close("success").result()


def test_the_tables_have_every_method() -> None:
    methods = {
        f"{each.__name__}.{name}"
        for each in CLASSES
        for name in vars(each)
        if not name.startswith("_") and not (name.endswith("_async") and hasattr(each, name.removesuffix("_async")))
    }
    assert methods == {*WORKING, *REFUSED, *ELSEWHERE}


@pytest.mark.parametrize("method", WORKING)
def test_a_method_works(clients: Clients, method: str) -> None:
    call_both(clients, method, WORKING[method])


@pytest.mark.parametrize("method", REFUSED)
def test_a_method_is_refused_with_what_to_do(clients: Clients, method: str) -> None:
    arguments, reason = REFUSED[method]
    for call in calls(clients, method):
        given = arguments(clients)
        with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError, RuntimeError), match=reason):
            call(*given)
    assert train(clients.training, 1), "the model continues"


def calls(clients: Clients, method: str) -> list[Callable[..., Any]]:
    """Return a method and its asynchronous twin, if it has one, as calls that return the result."""
    kind, name = method.split(".")
    client = getattr(clients, kind.removesuffix("Client").lower())
    twin = getattr(client, f"{name}_async", None)
    return [lambda *given: finish(getattr(client, name)(*given)), *([] if twin is None else [in_loop(twin)])]


def call_both(clients: Clients, method: str, arguments: Arguments) -> None:
    for call in calls(clients, method):
        if method == "TrainingClient.optim_step":
            clients.training.forward_backward(DATA, "cross_entropy").result()
        call(*arguments(clients))


def in_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    async def run(*given: Any) -> Any:
        result = await function(*given)
        return await result if inspect.isawaitable(result) else result

    return lambda *given: asyncio.run(run(*given))


def finish(result: Any) -> Any:
    return result.result() if hasattr(result, "result") else result


def test_a_traced_loss_has_the_gradient_of_the_same_built_in_one(server: RunningServer, clients: Clients) -> None:
    def halved(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = -(logprobs * weights).sum() / 2
        return loss, {"custom/halved:sum": loss}

    loss = clients.service.create_custom_loss(halved, {"logprobs": 1, "weights": 1}).result()
    built_in, traced = create(clients.service), create(clients.service)
    data = [datum(weights=np.full(len(SENTENCE) - 1, 0.5, np.float32))]
    expected = built_in.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
    metrics = traced.forward_backward_custom(DATA, loss).result().metrics
    assert metrics["custom/halved:sum"] == pytest.approx(expected)
    for client in (built_in, traced):
        client.optim_step(ADAM).result()
    ends = [adapter(server.folder, each.save_state("end").result().path) for each in (built_in, traced)]
    assert are_equal(*ends)


def test_a_model_is_audited_and_its_samples_are_counted(server: RunningServer) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as service:
        client = create(service)
        sampler = client.save_weights_and_get_sampling_client().result()
        train(client, 2)
        client.forward(DATA, "cross_entropy").result()
        with pytest.raises(tinker.RequestFailedError):
            client.forward_backward(DATA, "stable_reinforce").result()
        path = client.save_state("saved").result().path
        load = client.load_state(path)
        newest = client.save_weights_and_get_sampling_client(kind="inflight").result()
        load.result()
        tokens = {0: sample(sampler, 2).sequences, 3: sample(newest).sequences}
        url, headers = f"{server.url}/api/v1/training_runs/{client.model_id}", {"X-API-Key": KEY}
        audit = httpx.get(f"{url}/audit", headers=headers, timeout=PATIENCE_S).json()
        assert audit == {
            "model_id": client.model_id,
            "proven": True,
            "problems": [],
            "applied": 10,
            "refused": 1,
            "optimizer_steps": 2,
            "checkpoints": 1,
        }
        assert httpx.get(f"{url}/samples", headers=headers, timeout=PATIENCE_S).json()["versions"] == [
            {"version": version, "sequences": len(each), "tokens": sum(len(one.tokens) for one in each)}
            for version, each in tokens.items()
        ]
        (folder_of(server.folder, path) / "adapter_model.safetensors").unlink()
        broken = httpx.get(f"{url}/audit", headers=headers, timeout=PATIENCE_S).json()
        assert (broken["proven"], len(broken["problems"])) == (False, 1)


def test_a_sampling_client_goes_to_other_processes(clients: Clients) -> None:
    """A copy picks its request ids at random, up to 1e18."""
    whole = sample(clients.sampling, temperature=0.0).sequences[0]
    handle = clients.sampling.get_sampler_handle()
    copies = [pickle.loads(pickle.dumps(clients.sampling)) for _ in range(2)]
    copies.append(tinker.SamplingClient.from_sampler_handle(handle, api_key=KEY))
    with ThreadPoolExecutor(len(copies)) as pool:
        for answer in pool.map(lambda copy: sample(copy, temperature=0.0), copies):
            assert list(answer.sequences[0].tokens) == list(whole.tokens)
    for copy in copies:  # or its session's heartbeat ends with the process
        copy.holder.close()


def test_a_session_has_its_name_and_metadata(server: RunningServer) -> None:
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    about = {"experiment": "7"}
    with tinker.ServiceClient(about, base_url=server.url, api_key=KEY, display_name="nightly") as service:
        session = rest.get_session(service.holder.get_session_id()).result()
    assert (session.display_name, session.user_metadata) == ("nightly", about)


def test_a_copy_outlives_its_source(server: RunningServer, clients: Clients) -> None:
    """Its files are the source's, its session and model its own; it belongs to the key that made it."""
    train(clients.training, 2)
    kept = adapter(server.folder, source := clients.saved)
    sampled = clients.sampler_path
    copy = clients.rest.copy_weights(source, "any", ttl_seconds=HOUR_S).result()
    sampler_copy = clients.service.copy_weights(sampled).result()
    expected = sample(clients.service.create_sampling_client(sampled).result(), temperature=0.0).sequences[0]
    files = [folder_of(server.folder, each) / "adapter_model.safetensors" for each in (source, copy)]
    assert files[0].samefile(files[1])
    (listed,) = clients.rest.list_checkpoints(copy.split("/")[2]).result().checkpoints
    assert listed.tinker_path == copy
    assert listed.expires_at == listed.time + timedelta(seconds=HOUR_S)
    for path in (source, sampled):
        clients.rest.delete_checkpoint_from_tinker_path(path).result()
    wait_until_sync(lambda: not files[0].exists(), timeout_s=60)
    assert are_equal(adapter(server.folder, copy), kept)
    other = clients.service.create_training_client_from_state_with_optimizer(copy).result()
    assert are_equal(adapter(server.folder, other.save_state("same").result().path), kept)
    answer = sample(clients.service.create_sampling_client(sampler_copy).result(), temperature=0.0).sequences[0]
    assert list(answer.tokens) == list(expected.tokens)
    with pytest.raises(tinker.NotFoundError):
        tinker.RestClient(base_url=server.url, api_key=OTHER_KEY).copy_weights(copy, "any").result()
    with pytest.raises(tinker.NotFoundError, match="weights_access_token is not available"):
        clients.rest.copy_weights(source, "any", weights_access_token="tml-x").result()


def test_a_repeated_copy_is_one(server: RunningServer, clients: Clients) -> None:
    path, headers = clients.saved, {"X-API-Key": KEY, "X-Idempotency-Key": "once"}
    url = f"{server.url}/api/v1/copy_weights"

    def copy_once(_: int) -> Any:
        return httpx.post(url, json={"source_path": path}, headers=headers, timeout=PATIENCE_S).json()

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(copy_once, range(4)))
    assert len({each["tinker_path"] for each in answers}) == 1
    (copy,) = folder_of(server.folder, answers[0]["tinker_path"]).parent.iterdir()
    assert copy.name.startswith(path.rpartition("/")[2])


@pytest.mark.timeout(900)
def test_checkpoints_expire_also_across_a_restart(tmp_path: Path) -> None:
    with running_server(tmp_path / "run") as server:
        rest = tinker.RestClient(base_url=server.url, api_key=KEY)
        with tinker.ServiceClient(base_url=server.url, api_key=KEY) as service:
            client = create(service)
            train(client, 1)
            kept = client.save_state("kept", ttl_seconds=HOUR_S).result().path
            sampled = client.save_weights_for_sampler("sampled", ttl_seconds=2 * HOUR_S).result().path
            forever = client.save_state("forever").result().path
            brief = client.save_state("brief", ttl_seconds=HOUR_S).result().path
            assert expiries(rest, client.model_id) == {
                kept: timedelta(seconds=HOUR_S),
                sampled: timedelta(seconds=2 * HOUR_S),
                forever: None,
                brief: timedelta(seconds=HOUR_S),
            }
            for wrong in (0, -1, 1 << 40):
                with pytest.raises(tinker.RequestFailedError, match="ttl_seconds"):
                    client.save_state("wrong", ttl_seconds=wrong).result()
                with pytest.raises(tinker.BadRequestError, match="ttl_seconds"):
                    rest.set_checkpoint_ttl_from_tinker_path(kept, wrong).result()
            rest.set_checkpoint_ttl_from_tinker_path(sampled, None).result()
        rest.set_checkpoint_ttl_from_tinker_path(brief, 1).result()
        assert server.stop() == 0
    with running_server(tmp_path / "run") as server:
        rest = tinker.RestClient(base_url=server.url, api_key=KEY)
        found = expiries(rest, client.model_id)
        assert found == {kept: timedelta(seconds=HOUR_S), sampled: None, forever: None}
        wait_until_sync(lambda: not folder_exists(server.folder, brief))
        assert all(folder_exists(server.folder, each) for each in found)
        with tinker.ServiceClient(base_url=server.url, api_key=KEY) as service:
            with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
                service.create_training_client_from_state(brief).result()
            assert train(service.create_training_client_from_state(kept).result(), 1)
        assert server.stop() == 0


def expiries(rest: tinker.RestClient, model_id: str) -> dict[str, timedelta | None]:
    """Return each checkpoint's time to live, by path."""
    checkpoints = rest.list_checkpoints(model_id).result().checkpoints
    return {each.tinker_path: each.expires_at and each.expires_at - each.time for each in checkpoints}


def folder_exists(root: Path, path: str) -> bool:
    model_id, kind, name = path.removeprefix("tinker://").split("/")
    return any((root / "tinker" / "checkpoints" / model_id / kind).glob(f"{name}@*"))


def folder_of(root: Path, path: str) -> Path:
    model_id, kind, name = path.removeprefix("tinker://").split("/")
    (folder,) = (root / "tinker" / "checkpoints" / model_id / kind).glob(f"{name}@*")
    return folder
