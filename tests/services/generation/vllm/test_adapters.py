"""Changes of adapters beside requests and cancelled callers, with an engine that only records."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from offbeat.services.errors import RetryableError, WeightsError
from offbeat.services.generation.vllm.adapters import VllmAdapterEngine
from offbeat.services.generation.vllm.engine import VllmEngine
from offbeat.services.messages.types import GenerateRequest, Sampling
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

FOLDER = Path("/adapter")


class FakeLlm:
    """Samples one token once it `may_sample`; versions and salts are recorded."""

    def __init__(self) -> None:
        self.version = "default"
        self.salts: list[str] = []
        self.removed: list[int] = []
        self.may_sample = asyncio.Event()
        self.may_sample.set()

    async def update_weight_version(self, version: str) -> None:
        self.version = version

    async def remove_lora(self, number: int) -> None:
        self.removed.append(number)

    async def generate(self, prompt: Any, *_: object, **__: object) -> AsyncIterator[Any]:
        self.salts.append(prompt["cache_salt"])
        await self.may_sample.wait()
        logprobs = SimpleNamespace(start_indices=[0], end_indices=[1], logprobs=[-0.5], token_ids=[7])
        spans = [SimpleNamespace(version=self.version, start=0, end=1)]
        answer = SimpleNamespace(token_ids=[7], logprobs=logprobs, weight_versions=spans, finish_reason="stop")
        scores = SimpleNamespace(start_indices=[0, 0], end_indices=[0, 1], logprobs=[-0.5], token_ids=[7])
        yield SimpleNamespace(outputs=[answer], prompt_logprobs=scores, num_cached_tokens=0)


class FakeEngine:
    """Its worker's calls wait for `may_change`, and raise `error`."""

    vocab_size = 64

    def __init__(self) -> None:
        self.llm = FakeLlm()
        self.is_paused = False
        self.may_change = asyncio.Event()
        self.may_change.set()
        self.error: Exception | None = None

    async def pause(self) -> float:
        self.is_paused = True
        return time.monotonic()

    async def resume(self) -> None:
        self.is_paused = False

    async def call_worker(self, method: str, **arguments: Any) -> None:
        del method, arguments
        await self.may_change.wait()
        if self.error is not None:
            raise self.error

    def prompt_problem(self, prompt: Any) -> str:
        del prompt
        return ""

    async def stops_problem(self, sampling: Sampling) -> str:
        del sampling
        return ""


async def start(max_adapters: int = 1) -> tuple[FakeEngine, VllmAdapterEngine]:
    """Return the engine with adapter `a` at version 1."""
    fake = FakeEngine()
    engine = VllmAdapterEngine(cast("VllmEngine", fake), max_adapters=max_adapters, max_top=4)
    await engine.load(Path("/base"), 0)
    await engine.put_adapter("a", FOLDER, 1)
    return fake, engine


async def sample_version(engine: VllmAdapterEngine, adapter: str = "a", *, repeats: bool = True) -> int:
    request = GenerateRequest("r", (1, 2), Sampling(max_new_tokens=1))
    completion = (await engine.generate_with_top(request, adapter, 0, repeats=repeats)).completion
    assert not completion.error
    return completion.versions[0].version


async def test_a_change_is_finished_though_its_caller_is_cancelled() -> None:
    fake, engine = await start()
    fake.may_change.clear()
    putting = asyncio.create_task(engine.put_adapter("a", FOLDER, 2))
    await wait_until(lambda: fake.is_paused)
    putting.cancel()
    await asyncio.wait({putting})
    sampling = asyncio.create_task(sample_version(engine))
    await asyncio.sleep(0.01)
    assert len(fake.llm.salts) == 0  # a request that comes in a pause waits for its end
    fake.may_change.set()
    assert await sampling == 2
    assert not fake.is_paused


async def test_a_drop_follows_a_put_whose_caller_was_cancelled() -> None:
    fake, engine = await start()
    await engine.drop_adapter("a")
    fake.may_change.clear()
    putting = asyncio.create_task(engine.put_adapter("b", FOLDER, 1))
    await wait_until(lambda: fake.is_paused)
    putting.cancel()
    dropping = asyncio.create_task(engine.drop_adapter("b"))
    fake.may_change.set()
    await dropping
    assert len(fake.llm.removed) == 2
    await engine.put_adapter("c", FOLDER, 1)


async def test_the_cache_is_shared_by_equal_weights_alone() -> None:
    """An adapter that was dropped may come back under its name and version with other weights; so may the base."""
    fake, engine = await start()
    for name in ("a", "a", ""):
        await sample_version(engine, name)
    await engine.drop_adapter("a")
    await engine.put_adapter("a", FOLDER, 1)
    await sample_version(engine)
    await engine.load(Path("/base"), 0)
    for name in ("a", ""):
        await sample_version(engine, name)
    first, again, *others = fake.llm.salts
    assert first == again
    assert len({first, *others}) == 5


@pytest.mark.parametrize(
    ("kind", "changed", "is_repeated"),
    [("sample", "a", True), ("score", "a", True), ("sample", "b", False), ("once", "a", False)],
)
async def test_a_request_that_waited_for_a_change_is_made_again(kind: str, changed: str, is_repeated: bool) -> None:
    """Its salt is that of the former weights, under which others may have computed the prompt's keys and values."""
    fake, engine = await start(max_adapters=2)
    fake.llm.may_sample.clear()
    calls: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
        "sample": lambda: sample_version(engine),
        "score": lambda: engine.score((1, 2), "a"),
        "once": lambda: sample_version(engine, repeats=False),
    }
    request = asyncio.create_task(calls[kind]())
    await wait_until(lambda: len(fake.llm.salts) == 1)
    await engine.put_adapter(changed, FOLDER, 2)
    fake.llm.may_sample.set()
    await request
    assert len(fake.llm.salts) == (2 if is_repeated else 1)
    assert len(set(fake.llm.salts)) == len(fake.llm.salts)


async def test_a_dead_engine_is_distinguished_from_a_bad_adapter() -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    fake, engine = await start()
    for error, raised in ((EngineDeadError(), RetryableError), (ValueError("rank"), WeightsError)):
        fake.error = error
        with pytest.raises(raised):
            await engine.put_adapter("a", FOLDER, 2)
        assert not fake.is_paused
        assert await sample_version(engine) == 1
