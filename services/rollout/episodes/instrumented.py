"""Timing, counters and wait status of an episode's calls."""

import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from offbeat.services.messages.types import Completion, EpisodeKind, PromptImage
from offbeat.services.rollout.envs.runners import EnvRunner, Opening, StepResult
from offbeat.services.rollout.episodes.sampler import EpisodeSampler
from offbeat.services.rollout.metrics import WorkerMetrics
from offbeat.services.rollout.wait_status import Wait, Waiting
from offbeat.services.tracing.api import NO_SPANS, EpisodeSpans


class InstrumentedEpisode:
    __slots__ = ("_between", "_env", "_kind", "_reporter", "_sampler", "_step_limiter", "_tag", "_trace", "_waiting")

    def __init__(
        self,
        kind: EpisodeKind,
        tag: str,
        *,
        env: EnvRunner,
        step_limiter: AbstractAsyncContextManager[Any],
        sampler: EpisodeSampler,
        waiting: Waiting,
        reporter: WorkerMetrics,
        between: Wait | None = None,
        trace: EpisodeSpans = NO_SPANS,
    ) -> None:
        """between: wait status after a call; None if the next is immediate."""
        self._kind = kind
        self._tag = tag
        self._env = env
        self._step_limiter = step_limiter
        self._sampler = sampler
        self._waiting = waiting
        self._reporter = reporter
        self._between = between
        self._trace = trace

    async def reset(self, seed: int) -> Opening:
        self._waiting.enter(Wait.ENV)
        async with self._step_limiter:
            began = time.monotonic()
            with self._trace.reset():
                opening = await self._env.reset(seed)
            self._reporter.env_call(self._kind, self._tag, time.monotonic() - began)
        self._end()
        return opening

    async def step(self, action: str) -> StepResult:
        self._waiting.enter(Wait.ENV)
        async with self._step_limiter:
            began = time.monotonic()
            with self._trace.step():
                result = await self._env.step(action)
            self._reporter.env_call(self._kind, self._tag, time.monotonic() - began)
        self._end()
        return result

    async def image(self) -> bytes:
        self._waiting.enter(Wait.ENV)
        async with self._step_limiter:
            return await self._env.image()

    async def sample(
        self, prompt: Sequence[int], max_new_tokens: int, images: tuple[PromptImage, ...] = (), **stops: tuple[str, ...]
    ) -> Completion:
        self._waiting.enter(Wait.GENERATION)
        began = time.monotonic()
        with self._trace.chat(prompt, max_new_tokens) as record:
            completion = await self._sampler(prompt, max_new_tokens, images, **stops)
            record(completion)
        self._reporter.turn(self._kind, self._tag, completion, time.monotonic() - began)
        self._end()
        return completion

    def _end(self) -> None:
        if self._between is not None:
            self._waiting.enter(self._between)
