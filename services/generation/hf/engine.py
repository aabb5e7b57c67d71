"""Engine by transformers: an event loop schedules, one thread computes.

Invariants: weights change only between passes, so that every token has one version; new requests reuse no keys and
values of older weights.
"""

# pyright: basic
import asyncio
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from offbeat.services.chat.stops import StopStrings, load_decoder, stop_strings_of
from offbeat.services.errors import GenerationError, RetryableError, RolloutError
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.engine import (
    KvLoad,
    LoadTimes,
    MostLikely,
    PromptScores,
    SessionCounts,
    TopCompletion,
)
from offbeat.services.generation.hf.attention import KvCache
from offbeat.services.generation.hf.layout import Chunk, StepLayout
from offbeat.services.generation.hf.model import Adapter, PolicyModel, Route, Version
from offbeat.services.generation.hf.rows import RowStore
from offbeat.services.generation.hf.sampler import find_top, sample
from offbeat.services.generation.hf.scheduler import PlannedChunk, RunningSequence, Scheduler
from offbeat.services.generation.kv_cache import cache_problem
from offbeat.services.malloc import keep_freed_memory_here
from offbeat.services.messages.types import Completion, FinishReason, GenerateRequest, Sampling

MAX_PASSES_BEFORE_LOAD = 2
"""Passes before weights change, so that submitted requests reach their first token."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    version: int
    layers: dict[str, Adapter]


class SampledToken(NamedTuple):
    """top: one entry if asked for."""

    token: int
    logprob: float
    top: list[MostLikely]


class HfEngine:
    def __init__(self, model: PolicyModel, folder: Path, config: GenerationConfig, context: int, seed: int) -> None:
        """folder: of the model. context: longest sequence, tokens. Raises GenerationError if the cache does not hold one."""
        if problem := cache_problem(config.kv_cache_gib, context, model.bytes_per_token):
            raise GenerationError(f"actor_infer.kv_cache_gib: {problem}")
        num_rows = int(config.kv_cache_gib * 2**30) // (context * model.bytes_per_token)
        self._model = model
        self._folder = folder
        self._context = context
        self._recompute = config.on_weight_update == "recompute"
        self._timeout_s = config.update_timeout_s
        self._cache = KvCache(num_rows, context)
        rows = RowStore(num_rows, shares_prefixes=config.engine.enable_prefix_caching)
        self._scheduler = Scheduler(rows, config.engine.max_num_seqs, self._cache.copy)
        self._answers: dict[RunningSequence, asyncio.Future[Completion]] = {}
        self._generator = torch.Generator().manual_seed(seed)
        self._version = -1
        self._adapters: dict[str, LoadedAdapter] = {}
        self._staged: tuple[Path, Version, float] | None = None
        self._between_passes = asyncio.Lock()
        self._submitted = asyncio.Event()
        self._pass_began: float | None = None
        threads = max(1, round(config.cpus_per_replica))
        self._thread = ThreadPoolExecutor(1, "policy", initializer=torch.set_num_threads, initargs=(threads,))
        self._passes = asyncio.create_task(self._run())

    @classmethod
    async def start(
        cls, config: GenerationConfig, model: Path, *, sequence_length: int, seed: int, version: int | None = None
    ) -> "HfEngine":
        """version: of the folder's weights, to be served; None: weights are random until the first `load`."""
        keep_freed_memory_here()
        dtype = getattr(torch, config.model_args.dtype or "float32")
        policy = await asyncio.to_thread(PolicyModel, model, dtype, reads_weights=version is not None)
        engine = cls(policy, model, config, config.engine.max_model_len or sequence_length, seed)
        engine._version = -1 if version is None else version
        await engine.generate(GenerateRequest("warm-up", (0,), Sampling(max_new_tokens=2)), -1)
        return engine

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return self._scheduler.num_running

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens with cached keys and values."""
        return self._scheduler.reused_tokens

    def salted(self, salt: str) -> "HfEngine":
        """Return the engine: loading a run's weights drops all earlier keys and values."""
        del salt
        return self

    async def release(self, salt: str) -> None:
        """Do nothing: the next run's weights replace those of this one."""
        del salt

    async def generate(self, request: GenerateRequest, version: int, adapter: str = "") -> Completion:
        """adapter: name in `put_adapter`; empty samples the base model."""
        del version  # that of a token is known from the pass that sampled it
        return (await self.generate_with_top(request, adapter, 0)).completion

    async def generate_with_top(self, request: GenerateRequest, adapter: str, num_top: int) -> TopCompletion:
        """Sample as `generate`, with the most likely tokens in each sampled one's place."""
        if problem := self._problem(request, adapter):
            return TopCompletion(Completion(request.request_id, error=problem))
        try:
            stops = await self._stops(request)
        except RolloutError as error:
            return TopCompletion(Completion(request.request_id, error=str(error)))
        self._raise_if_dead()
        limit = min(request.sampling.max_new_tokens, self._context - len(request.prompt))
        sequence = RunningSequence(request, limit, list(request.prompt), adapter, num_top=num_top, stops=stops)
        answer = self._answers[sequence] = asyncio.get_running_loop().create_future()
        self._scheduler.add(sequence)
        self._submitted.set()
        try:
            return TopCompletion(await answer, sequence.top)
        finally:
            self._answers.pop(sequence, None)

    async def stage(self, path: Path) -> None:
        began = time.monotonic()
        version = await asyncio.to_thread(self._model.read, path)
        self._staged = path, version, time.monotonic() - began

    async def load(self, path: Path, version: int) -> LoadTimes:
        if self._staged is None or self._staged[0] != path:
            await self.stage(path)
        assert self._staged is not None
        (_, weights, load_s), self._staged = self._staged, None
        for _ in range(MAX_PASSES_BEFORE_LOAD):
            async with self._between_passes:
                if not self._scheduler.has_unstarted:
                    break
            await asyncio.sleep(0)  # an idle engine begins its first pass
        asked = time.monotonic()
        async with self._between_passes:
            self._raise_if_dead()
            self._model.exchange(weights)
            self._scheduler.change_weights(recompute=self._recompute)
            self._version = version
        return LoadTimes(pause_s=time.monotonic() - asked, load_s=load_s)

    async def put_adapter(self, name: str, folder: Path, version: int) -> None:
        """Serve a PEFT adapter as `name` from the next pass on.

        Raises:
            WeightsError: it does not fit the model.
        """
        layers = await asyncio.to_thread(self._model.read_adapters, folder)
        async with self._between_passes:
            self._raise_if_dead()
            self._model.route(layers)
            self._adapters[name] = LoadedAdapter(version, layers)
            self._scheduler.change_weights(recompute=self._recompute, adapter=name)

    async def drop_adapter(self, name: str) -> None:
        """Forget an adapter that no running request uses."""
        async with self._between_passes:
            self._adapters.pop(name, None)
            self._scheduler.change_weights(recompute=False, adapter=name)

    async def score(self, prompt: Sequence[int], adapter: str = "", num_top: int = 0) -> PromptScores:
        """Score a prompt's tokens but the first, at temperature 1. num_top: most likely tokens by place.

        Raises:
            GenerationError: the prompt is refused.
            RetryableError: the engine died.
        """
        if problem := self._problem(GenerateRequest("score", prompt, Sampling()), adapter):
            raise GenerationError(problem)
        layers = self._adapters[adapter].layers if adapter else {}
        async with self._between_passes:
            self._raise_if_dead()
            score = partial(self._model.score, prompt, layers, num_top)
            return await asyncio.get_running_loop().run_in_executor(self._thread, score)

    async def abort(self, request_ids: Sequence[str]) -> None:
        async with self._between_passes:
            for sequence in self._scheduler.sequences():
                if sequence.request.request_id in request_ids:
                    self._answer(sequence, sequence.completion(FinishReason.ABORT))

    async def sleep(self) -> None:
        """Do nothing: it has no devices."""

    async def wake(self) -> None:
        """Do nothing: it never slept."""

    def session_counts(self) -> SessionCounts:
        return SessionCounts()

    def kv_load(self) -> KvLoad:
        return KvLoad()

    async def check(self) -> None:
        self._raise_if_dead()
        if self._pass_began is not None and time.monotonic() > self._pass_began + self._timeout_s:
            raise RetryableError(f"the engine has computed one pass for {self._timeout_s:g} s")

    def close(self) -> None:
        self._passes.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _problem(self, request: GenerateRequest, adapter: str) -> str:
        """Return why a request is refused; empty if it is not."""
        if adapter and adapter not in self._adapters:
            return f"adapter {adapter} is not loaded"
        if request.images:
            return "the prompt holds images, and hf_infer reads none"
        if not 0 < len(request.prompt) < self._context:
            return f"a prompt of {len(request.prompt)} tokens does not fit a context of {self._context}"
        if min(request.prompt) < 0 or max(request.prompt) >= self._model.vocab_size:
            return f"a token id is outside the vocabulary of {self._model.vocab_size}"
        return ""

    async def _stops(self, request: GenerateRequest) -> StopStrings | None:
        """Raises RolloutError if the model has no tokenizer."""
        if not (texts := request.sampling.stop_strings):
            return None
        await asyncio.to_thread(load_decoder, self._folder)
        return stop_strings_of(self._folder, texts)

    def _raise_if_dead(self) -> None:
        if self._passes.done():
            error = None if self._passes.cancelled() else self._passes.exception()
            raise RetryableError(f"the engine failed: {error or 'closed'}") from error

    async def _run(self) -> None:
        """Compute passes while there are requests; any error ends the engine, and so does `close`."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._submitted.wait()
                async with self._between_passes:
                    self._drop_aborted()
                    if chunks := self._scheduler.plan():
                        self._pass_began = time.monotonic()
                        sampled = await loop.run_in_executor(self._thread, self._compute, chunks)
                        self._pass_began = None
                        self._record(chunks, sampled)
                    elif not self._scheduler.has_work:
                        self._submitted.clear()
        except BaseException as error:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(RetryableError(f"the engine failed: {str(error) or 'closed'}"))
            raise

    def _compute(self, chunks: list[PlannedChunk]) -> dict[int, SampledToken]:
        """Compute a pass; return the sampled tokens by row."""
        layout = StepLayout([Chunk(each.row.number, each.row.computed, each.tokens) for each in chunks], self._context)
        logits = self._model.logits(layout, self._cache, self._routes(chunks, layout))
        sequences = {each.row.number: each.sequence for each in chunks if each.is_last}
        places = [place for place, row in enumerate(layout.rows) if row in sequences]
        rows = [layout.rows[place] for place in places]
        if not rows:
            return {}
        parameters = [sequences[row].request.sampling for row in rows]
        ids, logprobs, distributions = sample(logits[places], parameters, self._generator)
        result: dict[int, SampledToken] = {}
        for i, row in enumerate(rows):
            top = find_top(distributions[i : i + 1], sequences[row].num_top)
            result[row] = SampledToken(ids[i], logprobs[i], top)
        return result

    def _routes(self, chunks: list[PlannedChunk], layout: StepLayout) -> list[Route]:
        rows: dict[str, set[int]] = {}
        for chunk in chunks:
            if chunk.sequence.adapter:
                rows.setdefault(chunk.sequence.adapter, set()).add(chunk.row.number)
        return [Route(self._adapters[name].layers, *layout.select(each)) for name, each in rows.items()]

    def _record(self, chunks: list[PlannedChunk], sampled: dict[int, SampledToken]) -> None:
        for chunk in chunks:
            chunk.row.computed += chunk.count
            if (result := sampled.get(chunk.row.number)) is None:
                continue
            token, logprob, top = result
            if math.isnan(logprob):
                self._cache.clear(chunk.row.number)  # a masked key that is no number spoils every later output
                chunk.row.computed = 0
                request_id = chunk.sequence.request.request_id
                self._answer(chunk.sequence, Completion(request_id, error="the logits are not finite"))
                continue
            adapter = self._adapters.get(chunk.sequence.adapter)
            chunk.sequence.add(token, logprob, self._version if adapter is None else adapter.version)
            chunk.sequence.top += top
            if reason := chunk.sequence.finish_reason():
                self._answer(chunk.sequence, chunk.sequence.completion(reason))

    def _answer(self, sequence: RunningSequence, completion: Completion) -> None:
        self._scheduler.remove(sequence)
        answer = self._answers.get(sequence)
        if answer is not None and not answer.done():
            answer.set_result(completion)

    def _drop_aborted(self) -> None:
        for sequence in self._scheduler.sequences():
            if sequence not in self._answers:
                self._scheduler.remove(sequence)
