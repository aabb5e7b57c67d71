"""SGLang's engine against its HTTP API: requests, versions, weight updates, and what it does when the server fails."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from os.path import exists
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
from msgspec import structs
from safetensors.torch import save_file

from offbeat.services.errors import GenerationError, RetryableError
from offbeat.services.generation.config import EngineStrategy, GeneratingArgs, GenerationConfig, VllmConfig
from offbeat.services.generation.replica import GenerationReplica
from offbeat.services.generation.sglang.engine import SglangEngine
from offbeat.services.generation.sglang.server import CONTEXT_MARGIN, server_arguments, server_environment
from offbeat.services.messages.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Manifest,
    PromptImage,
    Sampling,
    VersionSpan,
)
from offbeat.services.weights.transports.filesystem import FilesystemTransport
from tests.integration.policy_weights import write_policy
from tests.services.generation import generation_fakes
from tests.services.generation.sglang import fake_server
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
FAKE = (str(Path(fake_server.__file__)),)
CONTEXT = 4096


def config_of(*, engine: dict[str, Any] | None = None, **changes: Any) -> GenerationConfig:
    strategy = EngineStrategy(strategy_name="sglang", strategy_config=VllmConfig.model_validate(engine or {}))
    return GenerationConfig.model_validate({"device": "cuda", "strategy_args": strategy, **changes})


def request_of(name: str, length: int = 4, most: int = 4, stop: tuple[int, ...] = ()) -> GenerateRequest:
    return GenerateRequest(name, tuple(range(length)), Sampling(max_new_tokens=most, stop_token_ids=stop))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with weights of its own, which no update may read."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model-00001-of-00001.safetensors").write_bytes(b"")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    return folder


def weights(folder: Path, number: int) -> Path:
    path = folder / f"{number}.safetensors"
    save_file({"number": torch.tensor([number])}, path)
    return path


class Started:
    def __init__(self, engine: SglangEngine, url: str) -> None:
        self.engine = engine
        self._url = url

    async def state(self) -> dict[str, Any]:
        async with httpx.AsyncClient(trust_env=False) as http:
            return (await http.get(f"{self._url}/calls")).json()

    async def calls(self, *paths: str) -> list[dict[str, Any]]:
        return [call for call in (await self.state())["calls"] if call["path"] in paths]

    async def running(self, number: int) -> bool:
        return (await self.state())["running"] == number


Start = Callable[..., Any]


@pytest_asyncio.fixture
async def start(model: Path) -> AsyncIterator[Start]:
    engines: list[SglangEngine] = []

    async def start(**changes: Any) -> Started:
        engine = await SglangEngine.start(config_of(**changes), model, sequence_length=CONTEXT, seed=1, program=FAKE)
        engines.append(engine)
        return Started(engine, engine._server.url)

    yield start
    for engine in engines:
        engine.close()
        assert engine._server.exit_code is not None


async def test_an_answer_has_its_tokens_logprobs_and_version(start: Start, tmp_path: Path) -> None:
    started = await start()
    await started.engine.load(weights(tmp_path, 9), 3)
    answer = await started.engine.generate(request_of("a"), 3)
    expected = Completion("a", (9,) * 4, (-0.1,) * 4, (VersionSpan(0, 4, 3),), FinishReason.LENGTH)
    assert answer == expected
    stopped = await started.engine.generate(request_of("b", stop=(9,)), 3)
    assert (stopped.token_ids, stopped.finish_reason) == ((9,), FinishReason.STOP), "the stop token is part of it"


@pytest.mark.parametrize("of_run", [(), ("never",)])
async def test_an_answer_ends_with_its_stop_string(
    start: Start, model: Path, tmp_path: Path, of_run: tuple[str, ...]
) -> None:
    """By a server that samples past it: it decodes nothing if the run has no stop strings, else a token too late."""
    write_policy(model)
    started = await start(generating_args=GeneratingArgs(stop_strings=of_run))
    await started.engine.load(weights(tmp_path, 9), 3)
    sampling = Sampling(max_new_tokens=400, stop_strings=("w2 w2 w",))
    answer = await started.engine.generate(GenerateRequest("a", (4, 5), sampling), 3)
    assert answer == Completion("a", (9,) * 3, (-0.1,) * 3, (VersionSpan(0, 3, 3),), FinishReason.STOP)
    begun = GenerateRequest("b", (4, 9, 9), sampling, num_answered=2)
    assert (await started.engine.generate(begun, 3)).token_ids == (9,)
    call, _ = [each["sampling_params"] for each in await started.calls("/generate") if each["rid"] in ("a$", "b$")]
    assert (call["stop"], call["no_stop_trim"]) == ((["w2 w2 w"], True) if of_run else ([], False))
    assert (await started.engine.generate(request_of("c"), 3)).finish_reason is FinishReason.LENGTH


async def test_what_is_asked_is_what_the_request_says(start: Start) -> None:
    started = await start()
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=2, stop_token_ids=(1, 2))
    await started.engine.salted("run").generate(GenerateRequest("x", (5, 6), sampling), 4)
    (call,) = [each for each in await started.calls("/generate") if each["rid"] == "x$"]
    assert (call["input_ids"], call["return_logprob"], call["extra_key"]) == ([5, 6], True, "runv4")
    assert call["sampling_params"] == {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_new_tokens": 2, "stop_token_ids": [1, 2], "ignore_eos": False,
        "stop": [], "no_stop_trim": False,
    }  # fmt: skip


async def test_logprobs_under_top_k_are_those_of_the_tokens_kept(start: Start) -> None:
    started = await start()
    for top_k, logprob in ((-1, -1.0), (5, 0.0)):
        sampling = Sampling(top_p=0.9, top_k=top_k, max_new_tokens=2)
        answer = await started.engine.generate(GenerateRequest(f"top {top_k}", (5, 6), sampling), 0)
        assert answer.logprobs == (logprob,) * 2


@pytest.mark.parametrize("engine", [{"sampling_mask_max_tokens": 4}, {"speculative_algorithm": "EAGLE"}])
async def test_a_cut_whose_logprobs_are_not_recorded_is_answered(start: Start, engine: dict[str, Any]) -> None:
    """As of evaluations, and of runs that an earlier build started."""
    started = await start(engine=engine)
    sampling = Sampling(top_k=5, max_new_tokens=2)
    answer = await started.engine.generate(GenerateRequest("x", (5, 6), sampling), 0)
    assert (answer.error, answer.logprobs) == ("", (-1.0,) * 2)


async def test_top_k_of_0_keeps_every_token(start: Start) -> None:
    started = await start()
    answer = await started.engine.generate(GenerateRequest("x", (5, 6), Sampling(top_k=0, max_new_tokens=2)), 0)
    assert (answer.error, len(answer.token_ids)) == ("", 2)


@pytest.mark.parametrize(("on_update", "mode", "flush"), [("keep", "in_place", False), ("recompute", "retract", True)])
async def test_running_requests_continue_under_new_weights(
    start: Start, tmp_path: Path, on_update: str, mode: str, flush: bool
) -> None:
    """Each token has the version that sampled it; the server is asked in the order that SGLang needs."""
    started = await start(on_weight_update=on_update)
    await started.engine.load(weights(tmp_path, 1), 0)
    running = asyncio.create_task(started.engine.generate(request_of("long", most=4000), 0))
    await wait_until(lambda: started.running(1))
    await started.engine.generate(request_of("before"), 0)
    times = await started.engine.load(weights(tmp_path, 2), 1)
    await started.engine.generate(request_of("after"), 1)
    await started.engine.abort(["long"])
    answer = await running
    (first, second) = answer.versions
    assert (first.version, second.version, second.end) == (0, 1, len(answer.token_ids))
    assert answer.token_ids == (1,) * first.end + (2,) * (second.end - first.end)
    assert answer.logprobs == pytest.approx([-1 / (token + 1) for token in answer.token_ids])
    assert times.pause_s >= times.load_s > 0
    *_, pause, update, resume = await started.calls(
        "/pause_generation", "/update_weights_from_disk", "/continue_generation"
    )
    assert (pause["mode"], update["flush_cache"], update["weight_version"]) == (mode, flush, "1")
    assert (update["path"], resume["path"]) == ("/update_weights_from_disk", "/continue_generation")
    assert await asyncio.to_thread(exists, update["model_path"]) is False, "the links are removed"


async def test_weights_that_cannot_be_read_are_an_error(start: Start, tmp_path: Path) -> None:
    started = await start()
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no tensors")
    with pytest.raises(GenerationError, match=r"SGLang refused /update_weights_from_disk: Failed to load"):
        await started.engine.load(broken, 1)


async def test_an_aborted_request_returns_its_tokens(start: Start, tmp_path: Path) -> None:
    started = await start()
    await started.engine.load(weights(tmp_path, 1), 0)
    running = asyncio.create_task(started.engine.generate(request_of("long", most=4000), 0))
    await wait_until(lambda: started.running(1))
    await started.engine.abort(["long", "unknown"])
    answer = await running
    assert answer.finish_reason is FinishReason.ABORT
    assert len(answer.token_ids) < 4000


async def test_an_abort_spares_requests_whose_ids_begin_alike(start: Start, tmp_path: Path) -> None:
    """The server aborts by the beginning of an id: an agent's first call, and its tenth."""
    started = await start()
    await started.engine.load(weights(tmp_path, 1), 0)
    await started.engine._command("/pause_generation", {"mode": "in_place"})
    first, tenth = (
        asyncio.create_task(started.engine.generate(request_of(each, most=100), 0)) for each in ("agent-1", "agent-10")
    )
    await wait_until(lambda: started.running(2))
    await started.engine.abort(["agent-1"])
    assert (await first).finish_reason is FinishReason.ABORT
    await started.engine._command("/continue_generation", {})
    assert (await tenth).finish_reason is FinishReason.LENGTH


async def test_a_cancelled_request_leaves_the_server(start: Start) -> None:
    started = await start()
    running = asyncio.create_task(started.engine.generate(request_of("long", most=4000), 0))
    await wait_until(lambda: started.running(1))
    running.cancel()
    await wait_until(lambda: started.running(0))
    assert [call["rid"] for call in await started.calls("/abort_request")] == ["long$"]


async def test_a_sequence_may_fill_the_context(start: Start) -> None:
    started = await start()
    for length in (CONTEXT - 1, CONTEXT - 4):
        answer = await started.engine.generate(request_of("full", length, most=CONTEXT - length), 0)
        assert (len(answer.token_ids), answer.error) == (CONTEXT - length, "")


async def test_a_refused_request_is_an_answer_with_an_error(start: Start) -> None:
    started = await start()
    answer = await started.engine.generate(request_of("long", length=CONTEXT + 4), 0)
    assert answer == Completion("long", error=f"longer than the context of {CONTEXT + CONTEXT_MARGIN} tokens")
    shown = GenerateRequest("image", (1,), Sampling(), images=(PromptImage(0, 1, b"png"),))
    assert "take vllm" in (await started.engine.generate(shown, 0)).error


async def test_sleep_gives_up_memory_and_wake_takes_it_back(start: Start) -> None:
    started = await start(engine={"enable_sleep_mode": True})
    await started.engine.sleep()
    assert not (await started.state())["has_memory"]
    await started.engine.wake()
    assert (await started.state())["has_memory"]


async def test_a_dead_server_is_retryable(start: Start) -> None:
    started = await start()
    await started.engine.check()
    running = asyncio.create_task(started.engine.generate(request_of("long", most=4000), 0))
    await wait_until(lambda: started.running(1))
    started.engine.close()
    with pytest.raises(RetryableError, match="the engine failed"):
        await running
    with pytest.raises(RetryableError, match="the engine died with code"):
        await started.engine.check()


async def test_a_server_without_versions_per_token_is_refused(start: Start) -> None:
    with pytest.raises(GenerationError, match=r"does not record which weights sampled a token"):
        await start(engine={"without_versions": True})


async def test_a_server_that_does_not_start_is_named(start: Start) -> None:
    with pytest.raises(GenerationError, match=r"SGLang ended with code 2 while it started"):
        await start(engine={"no_such_argument": 1})


async def test_without_sglang_the_package_is_named(model: Path) -> None:
    with pytest.raises(GenerationError, match=r"SGLang is not installed: pip install sglang"):
        await SglangEngine.start(config_of(), model, sequence_length=CONTEXT, seed=1)


async def test_another_python_runs_the_server(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this one's variables; one that can't be run is named."""
    monkeypatch.setenv("VIRTUAL_ENV", "/venv")
    assert server_environment(config_of())["VIRTUAL_ENV"] == "/venv"
    named = config_of(strategy_args={"strategy_name": "sglang", "python": sys.executable})
    assert "VIRTUAL_ENV" not in server_environment(named)
    with pytest.raises(GenerationError, match=r"SGLang ended with code 1 while it started"):
        await SglangEngine.start(named, model, sequence_length=CONTEXT, seed=1)
    missing = config_of(strategy_args={"strategy_name": "sglang", "python": "/none/python"})
    with pytest.raises(GenerationError, match=r"strategy_args.python: there is no program '/none/python'"):
        await SglangEngine.start(missing, model, sequence_length=CONTEXT, seed=1)


class FileBroker(generation_fakes.FakeBroker):
    """Versions in files, which are fetched as those of a run."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._transport = FilesystemTransport("run", str(folder))

    async def publish_number(self, version: int, number: int) -> None:
        stored = self._transport.stage(version, 1, {"number": torch.tensor([number])})
        published = structs.replace(
            generation_fakes.manifest(version),
            location=stored.location,
            digest=stored.digest,
            num_bytes=stored.num_bytes,
        )
        async with self._rang:
            self.published.append(published)
            self._rang.notify_all()

    @asynccontextmanager
    async def fetch(self, manifest: Manifest) -> AsyncIterator[Path]:
        with self._transport.fetch(manifest) as path:
            yield path


async def test_a_replica_serves_what_a_broker_publishes(start: Start, tmp_path: Path) -> None:
    """Requests wait for their version; one that runs continues under the next."""
    started, broker = await start(), FileBroker(tmp_path / "weights")
    replica = GenerationReplica("r", started.engine, broker, config_of())
    following = asyncio.create_task(replica.follow())

    async def ask(request: GenerateRequest) -> Completion:
        ((answer,),) = [answers async for answers in replica.generate([request])]
        return answer

    waiting = asyncio.create_task(ask(replace(request_of("waits"), min_version=1)))
    await broker.publish_number(0, 5)
    await wait_until(lambda: replica.status()["version"] == 0)
    running = asyncio.create_task(ask(request_of("runs", most=4000, stop=(6,))))
    await wait_until(lambda: started.running(1))
    await started.engine.generate(request_of("before"), 0)
    await broker.publish_number(1, 6)
    assert (await waiting).token_ids == (6,) * 4
    answer = await running
    assert [span.version for span in answer.versions] == [0, 1]
    assert answer.token_ids == tuple(5 + span.version for span in answer.versions for _ in range(span.start, span.end))
    following.cancel()


def test_keys_become_the_servers_arguments(tmp_path: Path) -> None:
    engine = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
        "max_num_seqs": 7,
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False,
        "enable_sleep_mode": True,
        "schedule_policy": "fcfs",
        "enable_torch_compile": True,
        "cuda_graph_bs": [1, 2],
    }
    config = config_of(engine=engine, model_args={"dtype": "bfloat16"})
    words = " ".join(server_arguments(config, tmp_path, 64, 5))
    for expected in (
        f"--model-path {tmp_path} --load-format dummy",
        f"--context-length {64 + CONTEXT_MARGIN} --max-running-requests 7 --tp-size 2 --pp-size 3",
        "--mem-fraction-static 0.5",
        "--random-seed 5 --device cuda --disable-radix-cache --enable-memory-saver --enable-weights-cpu-backup",
        "--dtype bfloat16",
        "--schedule-policy fcfs --enable-torch-compile --cuda-graph-bs 1 2",
    ):
        assert expected in words
    assert "disable-cuda-graph" not in words


@pytest.mark.parametrize(("engine", "is_eager"), [({}, False), ({"enforce_eager": True}, True)])
def test_cuda_graphs_are_used_unless_the_configuration_forbids_them(
    engine: dict[str, Any], is_eager: bool, tmp_path: Path
) -> None:
    """Also by a run, whose components read its configuration from its record."""
    record = config_of(engine=engine).model_dump_json()
    arguments = server_arguments(GenerationConfig.model_validate_json(record), tmp_path, 64, 5)
    assert ("--disable-cuda-graph" in arguments) is is_eager


def test_on_a_cpu_the_cache_is_a_number_of_tokens(tmp_path: Path) -> None:
    """Of `kv_cache_gib`, where a share of the memory would be the whole machine's."""
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        config = config_of(device="cpu", model_args={"dtype": dtype}, kv_cache_gib=0.5, cpus_per_replica=3)
        words = " ".join(server_arguments(config, tmp_path, 64, 5))
        assert f"--max-total-tokens {2**29 // (2 * 4 * 2 * 32 * size)}" in words
        assert "mem-fraction-static" not in words
        environment = server_environment(config)
        assert (environment["SGLANG_USE_CPU_ENGINE"], environment["OMP_NUM_THREADS"]) == ("1", "3")
