"""Sampling of many adapters from one engine.

Invariants: an adapter in use stays in the engine; a missing one replaces the least recently used; no more are loaded
than fit.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from offbeat.services.errors import GenerationError, WeightsError
from offbeat.services.generation.engine import MostLikely, PromptScores, TopCompletion
from offbeat.services.messages.types import GenerateRequest, Sampling
from offbeat.services.tinker.errors import TinkerError
from offbeat.services.tinker.records import AdapterVersion
from offbeat.services.tinker.schemas import SampleBody
from offbeat.services.tinker.stops import read_stops
from offbeat.services.tinker.wire import SampleAnswer, SampledSequence

BASE_VERSION = 0


class AdapterEngine(Protocol):
    """Engine that samples the base model, or an adapter by name."""

    async def generate_with_top(self, request: GenerateRequest, adapter: str, num_top: int) -> TopCompletion: ...

    async def score(self, prompt: Sequence[int], adapter: str = "", num_top: int = 0) -> PromptScores: ...

    async def put_adapter(self, name: str, folder: Path, version: int) -> object: ...

    async def drop_adapter(self, name: str) -> None: ...

    async def check(self) -> None: ...


@dataclass(slots=True)
class AdapterSlot:
    loaded: AdapterVersion | None = None
    users: int = 0
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)


class AdapterSlots:
    def __init__(self, engine: AdapterEngine, max_adapters: int) -> None:
        self._engine = engine
        self._max_adapters = max_adapters
        self._slots: OrderedDict[str, AdapterSlot] = OrderedDict()
        """Least recently used first."""
        self._taking = asyncio.Lock()
        self._released = asyncio.Event()

    @asynccontextmanager
    async def hold(self, name: str, adapter: AdapterVersion) -> AsyncIterator[None]:
        """Keep an adapter in the engine, at this version or newer; wait while all that fit are in use.

        Raises:
            TinkerError: it can't be loaded.
        """
        slot = await self._take(name)
        try:
            async with slot.loading:
                if slot.loaded is None or slot.loaded.version < adapter.version:
                    await self._load(name, adapter)
                    slot.loaded = adapter
            yield
        finally:
            slot.users -= 1
            self._released.set()

    async def _take(self, name: str) -> AdapterSlot:
        """Use a slot, in the order of the calls, so that adapters in constant use starve no other."""
        async with self._taking:
            while name not in self._slots and len(self._slots) >= self._max_adapters:
                idle = next((each for each, slot in self._slots.items() if not slot.users), None)
                if idle is None:
                    self._released.clear()
                    await self._released.wait()
                else:
                    self._slots[idle].loaded = None  # if cancelled here, it may be dropped or not
                    await self._engine.drop_adapter(idle)
                    del self._slots[idle]
            slot = self._slots.setdefault(name, AdapterSlot())
            self._slots.move_to_end(name)
            slot.users += 1
            return slot

    async def _load(self, name: str, adapter: AdapterVersion) -> None:
        try:
            await self._engine.put_adapter(name, Path(adapter.folder), adapter.version)
        except (OSError, WeightsError) as error:
            raise TinkerError(f"the adapter can't be loaded, or its checkpoint was deleted: {error}") from error


class Sampler:
    def __init__(self, engine: AdapterEngine, end_ids: Sequence[int], *, context: int, max_adapters: int) -> None:
        self._engine = engine
        self._end_ids = end_ids
        self._context = context
        self._slots = AdapterSlots(engine, max_adapters)

    async def check(self) -> None:
        """Raise RetryableError if the engine is dead."""
        await self._engine.check()

    async def sample(
        self, body: SampleBody, request_id: str, name: str, adapter: AdapterVersion | None
    ) -> SampleAnswer:
        """Sample `num_samples` answers, and score the prompt if asked.

        name: of the adapter, empty for the base model.

        Raises:
            TinkerError: the engine refuses the request.
            RetryableError: the engine died.
        """
        if adapter is None:
            return await self._sample(body, request_id, "")
        async with self._slots.hold(name, adapter):
            return await self._sample(body, request_id, name)

    async def _sample(self, body: SampleBody, request_id: str, adapter: str) -> SampleAnswer:
        prompt, given = prompt_tokens(body), body.sampling_params
        stops = read_stops(given.stop, self._end_ids)
        sampling = Sampling(
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=given.top_k,
            max_new_tokens=given.max_tokens or self._context,
            stop_token_ids=stops.token_ids,
            stop_strings=stops.texts,
        )
        requests = [GenerateRequest(f"{request_id}:{i}", prompt, sampling) for i in range(body.num_samples)]
        num_top = body.topk_sample_logprobs
        answers = await asyncio.gather(*(self._engine.generate_with_top(each, adapter, num_top) for each in requests))
        sequences = [_sequence(answer) for answer in answers]
        num_top = body.topk_prompt_logprobs
        if not body.prompt_logprobs and not num_top:
            return SampleAnswer(sequences)
        try:
            scores = await self._engine.score(prompt, adapter, num_top)
        except GenerationError as error:
            raise TinkerError(str(error)) from error
        skipped = len(prompt) - min(body.prompt_logprobs_last_n or len(prompt), len(prompt))
        logprobs = [math.nan] * skipped + [math.nan, *scores.logprobs][skipped:]
        top = [MostLikely()] * skipped + [MostLikely(), *scores.top][skipped:]
        return SampleAnswer(sequences, logprobs if body.prompt_logprobs else None, top if num_top else None)


def prompt_tokens(body: SampleBody) -> tuple[int, ...]:
    """Return the prompt; raises TinkerError unless it is all text."""
    tokens: list[int] = []
    for i, chunk in enumerate(body.prompt.chunks):
        if chunk.type != "encoded_text" or chunk.tokens is None:
            raise TinkerError(f"prompt.chunks[{i}] is {chunk.type}: only encoded_text with tokens is served")
        tokens += chunk.tokens
    return tuple(tokens)


def count_top(body: SampleBody, context: int) -> int:
    """Return how many likely tokens a sample may have. context: of the model."""
    prompt = sum(len(chunk.tokens or ()) for chunk in body.prompt.chunks)
    longest = min(body.sampling_params.max_tokens or context, max(context - prompt, 0))
    return body.num_samples * longest * body.topk_sample_logprobs + prompt * body.topk_prompt_logprobs


def _sequence(answer: TopCompletion) -> SampledSequence:
    completion = answer.completion
    if completion.error:
        raise TinkerError(completion.error)
    versions = [span.version for span in completion.versions for _ in range(span.start, span.end)]
    reason = completion.finish_reason.value
    return SampledSequence(completion.token_ids, completion.logprobs, versions, reason, answer.top or None)
