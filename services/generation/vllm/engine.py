"""vLLM's engine, with weight changes while it runs."""

# pyright: basic
import asyncio
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from offbeat.services.chat.stops import load_decoder
from offbeat.services.chat.vision import IMAGE_INPUT_ADVICE, reads_images
from offbeat.services.errors import GenerationError, RetryableError, RolloutError
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.engine import KvLoad, LoadTimes, SessionCounts
from offbeat.services.generation.vllm.arguments import engine_arguments, engine_environment, extension_arguments
from offbeat.services.generation.vllm.sessions import KEYS_ALONE, AbortedError, CacheGroups, Sessions, SessionTurn
from offbeat.services.generation.vllm.update_request import TAKE_ADAPTER, is_whole, update_request_of
from offbeat.services.generation.vllm.without_torchvision import register_model
from offbeat.services.messages.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Sampling,
    VersionSpan,
)
from offbeat.services.process import uncollected_imports
from offbeat.services.standard_error import StandardError

BACKENDS = {"shm": "offbeat_file", "fs": "offbeat_file", "ipc": "offbeat_ipc", "nccl": "offbeat_nccl"}
"""Weight transport -> vLLM weight-transfer engine."""
MAX_CACHED_SAMPLING_PARAMS = 1024
"""Turns differ in their maximum tokens."""
SHUTDOWN_TIMEOUT_S = 0.5
FINISH_REASONS = {"stop": FinishReason.STOP, "abort": FinishReason.ABORT}
"""Of vLLM; others leave an answer incomplete."""


class VllmEngine:
    def __init__(
        self,
        llm: Any,
        config: GenerationConfig,
        salt: str = "",
        image_prompts: Any = None,
        sessions: Sessions | None = None,
        groups: CacheGroups = KEYS_ALONE,
        kv_stats: Any = None,
    ) -> None:
        """image_prompts: `vision.PromptMaker`, if the model reads images. sessions: those of all that share `llm`.
        kv_stats: `KvStats` of `llm`.
        """
        self.llm = llm
        self.sessions = sessions or Sessions(llm, config.engine.max_num_seqs, groups)
        self._config = config
        self._image_prompts = image_prompts
        self._kv_stats = kv_stats
        self._max_length: int = llm.model_config.max_model_len
        self._parameters = lru_cache(MAX_CACHED_SAMPLING_PARAMS)(sampling_parameters)
        self._salt = salt
        self.vocab_size: int = llm.model_config.get_vocab_size()
        self._salted = config.engine.enable_prefix_caching and config.on_weight_update == "keep"
        self._recompute = config.on_weight_update == "recompute"
        # By asynchronous scheduling or pipeline stages: the engine then answers while steps are in flight
        self._steps_ahead = llm.vllm_config.max_concurrent_batches > 1
        # A step ahead also reads the token that ended a turn, and a recurrent layer's state can't take it back
        self._has_sessions = config.keeps_sessions and not (self._steps_ahead and self.sessions.groups.num_state_blocks)
        self._adapter: Any = None
        self._stage_s: float | None = None
        self._pausing: asyncio.Task[None] | None = None
        self._asked: asyncio.Task[bool] | None = None
        self._asked_at = 0.0

    @classmethod
    async def start(
        cls, config: GenerationConfig, model: Path, *, sequence_length: int, seed: int, transport: str = "shm"
    ) -> "VllmEngine":
        os.environ.update(engine_environment(config))
        logging.getLogger("vllm").setLevel(logging.WARNING)
        logging.getLogger("vllm.config.scheduler").setLevel(logging.ERROR)  # warns of any scheduler but its own
        with uncollected_imports():
            from vllm.config import WeightTransferConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            from offbeat.services.generation.vllm.kv_stats import KvStats

        arguments = extension_arguments(config) | engine_arguments(config, model, sequence_length, seed)
        arguments["weight_transfer_config"] = WeightTransferConfig(backend=BACKENDS[transport])
        register_model(model)
        image_prompts = None
        if reads_images(model, config.model_args.image_input):
            from offbeat.services.generation.vllm import vision

            vision.register()
            image_prompts = vision.PromptMaker(model)
        printed = StandardError()
        try:
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[KvStats])
        except RuntimeError as error:  # of a process that only printed why
            if (cause := printed.last_error()) is None:
                raise
            raise GenerationError(f"vLLM did not start: {cause}") from error
        groups = CacheGroups(*(await llm.collective_rpc("prepare"))[0])
        if config.engine.max_lora_rank is not None:
            await llm.collective_rpc("prepare_adapters")
        assert llm.logger_manager is not None, "a logger is given"
        kv_stats = next(each for each in llm.logger_manager.stat_loggers if isinstance(each, KvStats))
        engine = cls(llm, config, image_prompts=image_prompts, groups=groups, kv_stats=kv_stats)
        await engine.warm_up()
        return engine

    def salted(self, salt: str) -> "VllmEngine":
        return VllmEngine(self.llm, self._config, salt, self._image_prompts, self.sessions, kv_stats=self._kv_stats)

    async def release(self, salt: str) -> None:
        """Do nothing: the next run's weights replace those of this one."""
        del salt

    async def warm_up(self) -> None:
        """Sample two tokens, since vLLM's first request takes seconds."""
        from vllm.inputs import tokens_input

        request = GenerateRequest("warm-up", (0,), Sampling(max_new_tokens=2))
        parameters = self._parameters(request.sampling)
        async for _ in self.llm.generate(tokens_input([0]), parameters, request.request_id):
            pass

    async def generate(self, request: GenerateRequest, version: int) -> Completion:
        """Sample; the version salts the prefix cache."""
        from vllm.exceptions import VLLMClientError

        if problem := self.prompt_problem(request.prompt) or await self.stops_problem(request.sampling):
            return Completion(request.request_id, error=problem)
        try:
            with engine_failures():
                return await self._sample(request, f"{self._salt}v{version}")
        except (VLLMClientError, ValueError) as error:
            return Completion(request.request_id, error=str(error))
        except AbortedError as error:
            raise RetryableError(f"request {request.request_id} was aborted") from error

    def prompt_problem(self, prompt: Sequence[int]) -> str:
        """Return why vLLM would die of a prompt, empty if it would not: without a tokenizer it does not look."""
        if prompt and not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            return f"a token id is outside the vocabulary of {self.vocab_size}"
        return ""

    async def stops_problem(self, sampling: Sampling) -> str:
        """Return why the engine would die of stop strings, empty if it would not."""
        if sampling.stop_strings:
            try:
                await asyncio.to_thread(load_decoder, Path(self.llm.model_config.model))
            except RolloutError as error:
                return str(error)
        return ""

    async def _sample(self, request: GenerateRequest, salt: str) -> Completion:
        if self._has_sessions and self._stays(request):
            parameters = self._parameters(request.sampling, _num_answered(request), is_session=True)
            turn = SessionTurn(request, salt, parameters, self._adapter)
            return await self.sessions.generate(turn)
        await self.sessions.make_room(request)
        with self.sessions.running(request):
            start = request.routing_start
            parameters = self._parameters(request.sampling, _num_answered(request), routing_start=start)
            prompt = self._prompt(request, salt)
            sampling = self.llm.generate(prompt, parameters, request.request_id, lora_request=self._adapter)
            outputs = [out async for out in sampling]
        (answer,) = outputs[-1].outputs
        return _completion(request.request_id, answer, outputs[-1].num_cached_tokens or 0)

    def _stays(self, request: GenerateRequest) -> bool:
        """Return whether the request is of an episode that stays in the engine."""
        # of a session, vLLM checks the new tokens alone
        return request.continues and not request.images and 0 < len(request.prompt) < self._max_length

    def _prompt(self, request: GenerateRequest, salt: str) -> Any:
        from vllm.inputs import tokens_input

        if not request.images:
            return tokens_input(list(request.prompt), cache_salt=salt if self._salted else None)
        if self._image_prompts is None:
            raise ValueError(f"the prompt holds images, and this model reads none: {IMAGE_INPUT_ADVICE}")
        return self._image_prompts(request, salt, share_prefixes=self._salted)

    async def stage(self, path: Path) -> None:
        """On a CPU, reload into a twin in slices between engine steps; else leave all to `load`."""
        began, self._stage_s = time.monotonic(), None
        if is_whole(path) and await self.call_worker("stage_weights", path=str(path)):
            while not await self.call_worker("stage_more"):
                pass
            self._stage_s = time.monotonic() - began

    async def load(self, path: Path, version: int) -> LoadTimes:
        """Load weights. For `recompute`, the pause drops the KV cache; for `keep`, the salt separates old entries."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        ticket = update_request_of(path)
        if ticket.init is not None:
            await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=ticket.init))
        asked = await self.pause()
        paused = time.monotonic()
        taking = self.call_worker(ticket.method, **ticket.arguments)
        await asyncio.gather(taking, self.llm.update_weight_version(str(version)))
        loaded = time.monotonic()
        self._adapter = _adapter_request() if ticket.method == TAKE_ADAPTER else None
        await self.resume()
        running = time.monotonic()
        if ticket.init is not None:
            await self.llm.shutdown_weight_transfer_engine()
        staged_s, self._stage_s = self._stage_s, None
        return LoadTimes(pause_s=running - asked, load_s=loaded - paused if staged_s is None else staged_s)

    async def pause(self) -> float:
        """Wait until no step runs or will start; return the time of the request. Running turns stay in the engine."""
        await self._start_waiting_requests()
        await self.sessions.close_all()
        asked = time.monotonic()
        await self._stop_steps()
        return asked

    async def resume(self) -> None:
        await self.llm.resume_generation()
        self.sessions.reopen()

    async def call_worker(self, method: str, **arguments: Any) -> Any:
        return (await self.llm.collective_rpc(method, kwargs=arguments))[0]

    async def _stop_steps(self) -> None:
        """Pause without vLLM's sleep of 20 ms."""
        if self._pausing is not None:
            await self._pausing
        self._pausing = asyncio.create_task(self.llm.pause_generation(mode="keep", clear_cache=self._recompute))
        if self._recompute or self._steps_ahead:
            await self._pausing
        while not self._pausing.done() and not await self.llm.is_paused():
            pass
        if self._pausing.done():
            self._pausing.result()

    async def _start_waiting_requests(self) -> None:
        """Let submitted requests reach their first token before weights change. The engine answers between steps, so
        one step has scheduled whatever fits.
        """
        for _ in range(2):
            await self.llm.is_paused()

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self.llm.abort(request_ids)

    async def sleep(self) -> None:
        """Move the weights to the host's memory and drop the KV cache; without devices, only pause."""
        await self.llm.sleep(level=1 if self._on_gpu else 0, mode="wait")

    async def wake(self) -> None:
        await self.llm.wake_up(None if self._on_gpu else ["scheduling"])

    @property
    def _on_gpu(self) -> bool:
        return self._config.device == "cuda"

    def session_counts(self) -> SessionCounts:
        return SessionCounts(self.sessions.num_waiting, self.sessions.num_continued)

    def kv_load(self) -> KvLoad:
        if self._kv_stats is None:
            return KvLoad()
        return self._kv_stats.load(self.sessions.capacity.max_tokens, kept=self.sessions.kept_share)

    async def check(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self.llm.check_health()
        except EngineDeadError as error:
            raise RetryableError("the engine died") from error
        # vLLM notices a core that died, not one that hangs: that one answers no question between two steps
        if self._asked is None or self._asked.done():
            self._asked, self._asked_at = asyncio.create_task(self.llm.is_paused()), time.monotonic()
        elif time.monotonic() > self._asked_at + self._config.update_timeout_s:
            raise RetryableError(f"the engine has not answered for {self._config.update_timeout_s:g} s")

    def close(self) -> None:
        self.llm.shutdown(timeout=SHUTDOWN_TIMEOUT_S)


def _adapter_request() -> Any:
    from offbeat.services.generation.vllm import lora

    return lora.request()


@contextmanager
def engine_failures() -> Iterator[None]:
    """Translate vLLM's errors of a dead engine to `RetryableError`."""
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        yield
    except (EngineDeadError, EngineGenerateError) as error:
        raise RetryableError(f"the engine failed: {error}") from error


def sampling_parameters(
    sampling: Sampling,
    num_answered: int = 0,
    *,
    is_session: bool = False,
    num_logprobs: int = 0,
    routing_start: int = 0,
) -> Any:
    """num_answered, routing_start: as of `GenerateRequest`. num_logprobs: most likely tokens in each place, beside the
    sampled one.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    from offbeat.services.generation.vllm.stops import NUM_ANSWERED, STOP_STRINGS

    stops = {STOP_STRINGS: list(sampling.stop_strings), NUM_ANSWERED: num_answered} if sampling.stop_strings else None
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # the request alone says what stops it
        logprobs=num_logprobs,
        flat_logprobs=True,
        detokenize=False,
        extra_args=stops,
        routed_experts_prompt_start=routing_start,
        output_kind=RequestOutputKind.DELTA if is_session else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # a copy is made for each request all the same; they share what one engine fills in alike
    )


def _num_answered(request: GenerateRequest) -> int:
    return request.num_answered if request.sampling.stop_strings else 0  # else requests differ in nothing


def finish_reason(output: Any) -> FinishReason:
    return FINISH_REASONS.get(output.finish_reason, FinishReason.LENGTH)


def _completion(request_id: str, output: Any, cached_tokens: int) -> Completion:
    if not output.token_ids:  # aborted before its first token
        return Completion(request_id, finish_reason=FinishReason.ABORT)
    spans = tuple(VersionSpan(span.start, span.end, int(span.version)) for span in output.weight_versions)
    tokens, logprobs = tuple(output.token_ids), tuple(output.logprobs.logprobs)
    reason, routing = finish_reason(output), output.routed_experts
    return Completion(request_id, tokens, logprobs, spans, reason, cached_tokens=cached_tokens, routing=routing)
