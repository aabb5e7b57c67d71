"""vLLM with many low-rank adapters, by name.

Invariants: an adapter is replaced between two steps; every token has the version of the adapter that sampled it; no
request reuses keys and values of other weights; changes are made one by one, and wholly if their callers are cancelled.
"""

# pyright: basic
import asyncio
import itertools
import math
import os
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from offbeat.services.errors import GenerationError, RetryableError, WeightsError
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.engine import KvLoad, LoadTimes, MostLikely, PromptScores, TopCompletion
from offbeat.services.generation.vllm.engine import VllmEngine, engine_failures, finish_reason, sampling_parameters
from offbeat.services.messages.types import Completion, FinishReason, GenerateRequest, Sampling, VersionSpan

WORKER_EXTENSION = "offbeat.services.generation.vllm.adapter_worker.AdapterWorkerExtension"

T = TypeVar("T")


@dataclass(slots=True)
class NamedAdapter:
    """Adapter in the engine. number: vLLM's id."""

    number: int
    folder: str = ""
    changes: list[int] = field(default_factory=list[int])
    """Changes of the engine at which its versions began, ascending."""
    versions: list[int] = field(default_factory=list[int])

    def version_at(self, change: int) -> int:
        return self.versions[bisect_right(self.changes, change) - 1]

    def change_at(self, change: int) -> int:
        """Return the change at which the version began that a change of the engine found."""
        return self.changes[bisect_right(self.changes, change) - 1]


class VllmAdapterEngine:
    def __init__(self, engine: VllmEngine, max_adapters: int, max_top: int) -> None:
        self._engine = engine
        self._max_adapters = max_adapters
        self._llm = engine.llm
        self._max_top = min(max_top, engine.vocab_size)
        self._base = NamedAdapter(0, "", [-1], [-1])
        self._adapters: dict[str, NamedAdapter] = {}
        self._numbers = itertools.count(1)
        self._score_numbers = itertools.count()
        self._num_changes = 0
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()
        """Running and waiting ones; the event loop alone would not keep them alive."""

    @classmethod
    async def start(
        cls,
        config: GenerationConfig,
        model: Path,
        *,
        sequence_length: int,
        seed: int,
        max_adapters: int,
        max_lora_rank: int,
        max_top: int,
        worker_extension: str = WORKER_EXTENSION,
        transport: str = "shm",
    ) -> "VllmAdapterEngine":
        """max_adapters: in memory at once; max_top: largest `num_top`. worker_extension: that of `VllmEngine` adapts no
        output embeddings.
        """
        slots = max_adapters
        if config.device == "cpu":
            slots += 1  # vLLM there takes the last slot for a request without adapter
        config = config.with_engine(
            max_lora_rank=max_lora_rank,
            max_loras=slots,
            max_cpu_loras=slots,
            max_logprobs=max_top,
            worker_extension_cls=worker_extension,
        ).model_copy(update={"keep_sessions": False})
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the default on GPUs, which scores prompts by other methods
        engine = await VllmEngine.start(config, model, sequence_length=sequence_length, seed=seed, transport=transport)
        return cls(engine, max_adapters, max_top)

    async def load(self, path: Path, version: int) -> None:
        """Load the base model from a file; raises WeightsError if it does not fit the model."""
        await self._finish(partial(self._change, self._base, version, "take_base", path=str(path)))

    async def put_adapter(self, name: str, folder: Path, version: int) -> LoadTimes:
        """Serve a PEFT adapter as `name` from the next step on.

        Raises:
            WeightsError: it does not fit the model, or other adapters fill the memory; an earlier version stays.
            RetryableError: the engine died.
        """
        return await self._finish(partial(self._put, name, str(folder), version))

    async def drop_adapter(self, name: str) -> None:
        """Forget an adapter that no running request uses."""
        await self._finish(partial(self._drop, name))

    async def generate_with_top(
        self,
        request: GenerateRequest,
        adapter: str,
        num_top: int,
        *,
        repeats: bool = True,
    ) -> TopCompletion:
        """Sample, with the most likely tokens in each sampled one's place; refused requests yield `error`.

        repeats: sample again if the adapter changes before the
        first token, as part of the prompt may have the former weights.

        Raises:
            RetryableError: the engine died.
        """
        if problem := await self._engine.stops_problem(request.sampling):
            return TopCompletion(Completion(request.request_id, error=problem))
        parameters = sampling_parameters(request.sampling, num_logprobs=min(num_top, self._max_top))
        try:
            output, source = await self._run(request.request_id, request.prompt, adapter, parameters, repeats=repeats)
        except GenerationError as error:
            return TopCompletion(Completion(request.request_id, error=str(error)))
        (answer,) = output.outputs
        if not answer.token_ids:  # aborted before its first token
            return TopCompletion(Completion(request.request_id, finish_reason=FinishReason.ABORT))
        spans = _spans(answer.weight_versions, source)
        logprobs, top = _read(answer.logprobs)
        reason = finish_reason(answer)
        tokens = tuple(answer.token_ids)
        cached = output.num_cached_tokens or 0
        completion = Completion(request.request_id, tokens, tuple(logprobs), spans, reason, cached_tokens=cached)
        return TopCompletion(completion, top if num_top else ())

    async def score(self, prompt: Sequence[int], adapter: str = "", num_top: int = 0) -> PromptScores:
        """Score a prompt's tokens but the first, at temperature 1. num_top: most likely tokens by place.

        Raises:
            GenerationError: the prompt is refused.
            RetryableError: the engine died.
        """
        parameters = sampling_parameters(Sampling(temperature=0.0, max_new_tokens=1))
        parameters.prompt_logprobs = min(num_top, self._max_top)
        parameters.skip_reading_prefix_cache = True  # cached positions have no logits
        output, _ = await self._run(f"score-{next(self._score_numbers)}", prompt, adapter, parameters)
        logprobs, top = _read(output.prompt_logprobs)
        return PromptScores(logprobs, top if num_top else ())

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._engine.abort(request_ids)

    def kv_load(self) -> KvLoad:
        return self._engine.kv_load()

    async def check(self) -> None:
        await self._engine.check()

    def close(self) -> None:
        self._engine.close()

    async def _run(
        self,
        request_id: str,
        prompt: Sequence[int],
        name: str,
        parameters: Any,
        *,
        repeats: bool = True,
    ) -> tuple[Any, NamedAdapter]:
        """Return vLLM's output and the adapter. repeats: as in `generate_with_top`

        Raises:
            GenerationError: the request is refused.
            RetryableError: the engine died.
        """
        from vllm.inputs import tokens_input
        from vllm.lora.request import LoRARequest

        while True:
            # a request that came in a pause would continue an older version's keys and values
            async with self._changing:
                adapter = self._find(prompt, name)
                # by changes: versions and names may come again with other weights
                base, change = self._base.changes[-1], adapter.changes[-1]
            tokens = tokens_input(list(prompt), cache_salt=f"{base}/{change}")
            lora = LoRARequest(name, adapter.number, adapter.folder) if name else None
            output = await self._submit(request_id, tokens, parameters, lora)
            spans = output.outputs[0].weight_versions
            if not repeats or not spans or adapter.change_at(int(spans[0].version)) == change:
                return output, adapter

    async def _submit(self, request_id: str, tokens: Any, parameters: Any, lora: Any) -> Any:
        """Return vLLM's output; raises as `_run`."""
        from vllm.exceptions import VLLMClientError

        try:
            with engine_failures():
                sampling = self._llm.generate(tokens, parameters, request_id, lora_request=lora)
                return [output async for output in sampling][-1]
        except (VLLMClientError, ValueError) as error:
            raise GenerationError(str(error)) from error

    def _find(self, prompt: Sequence[int], name: str) -> NamedAdapter:
        """Return what samples a prompt; raises GenerationError if it is refused."""
        adapter = self._adapters.get(name) if name else self._base
        if adapter is None:
            raise GenerationError(f"adapter {name} is not loaded")
        if problem := self._engine.prompt_problem(prompt):
            raise GenerationError(problem)
        return adapter

    async def _finish(self, change: Callable[[], Awaitable[T]]) -> T:
        """Make a change after those before it, even if the caller is cancelled."""

        async def make() -> T:
            async with self._changing:
                with engine_failures():
                    return await change()

        task = asyncio.create_task(make())
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _put(self, name: str, folder: str, version: int) -> LoadTimes:
        if name not in self._adapters and len(self._adapters) >= self._max_adapters:
            raise WeightsError(f"the engine has {len(self._adapters)} adapters already")
        adapter = self._adapters.get(name) or NamedAdapter(next(self._numbers))
        times = await self._change(adapter, version, "put_adapter", name=name, number=adapter.number, folder=folder)
        adapter.folder = folder
        self._adapters[name] = adapter
        return times

    async def _drop(self, name: str) -> None:
        if (adapter := self._adapters.pop(name, None)) is not None:
            await self._llm.remove_lora(adapter.number)

    async def _change(self, adapter: NamedAdapter, version: int, method: str, **arguments: Any) -> LoadTimes:
        """Change weights between two steps; tokens of later ones have `version`. Raises WeightsError."""
        try:
            asked = await self._engine.pause()
            paused = time.monotonic()
            await self._call_worker(method, **arguments)
            loaded = time.monotonic()
            self._num_changes += 1
            await self._llm.update_weight_version(str(self._num_changes))
            adapter.changes.append(self._num_changes)
            adapter.versions.append(version)
        finally:
            await self._engine.resume()
        return LoadTimes(pause_s=time.monotonic() - asked, load_s=loaded - paused)

    async def _call_worker(self, method: str, **arguments: Any) -> None:
        try:
            with engine_failures():
                await self._engine.call_worker(method, **arguments)
        except RetryableError:
            raise
        except Exception as error:  # vLLM has no class for what a worker raised
            raise WeightsError(str(error)) from error


def _spans(spans: Sequence[Any], source: NamedAdapter) -> tuple[VersionSpan, ...]:
    """Return spans of versions; vLLM's begin at each change of the engine, those of other adapters included."""
    joined: list[VersionSpan] = []
    for span in spans:
        version = source.version_at(int(span.version))
        if joined and joined[-1].version == version:
            joined[-1] = joined[-1]._replace(end=span.end)
        else:
            joined.append(VersionSpan(span.start, span.end, version))
    return tuple(joined)


def _read(flat: Any) -> tuple[list[float], list[MostLikely]]:
    """Read vLLM's table: in each place, but a prompt's first, the token itself, then the most likely ones."""
    places = [(start, end) for start, end in zip(flat.start_indices, flat.end_indices, strict=True) if start < end]
    logprobs = [flat.logprobs[start] for start, _ in places]
    top: list[MostLikely] = []
    for start, end in places:
        likely = range(start + 1, end)
        possible = [i for i in likely if flat.logprobs[i] > -math.inf]
        top.append(MostLikely([flat.token_ids[i] for i in possible], [flat.logprobs[i] for i in possible]))
    return logprobs, top
