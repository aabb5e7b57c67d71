"""Sampling of turns; retries resend the prompt."""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Self

from offbeat.services.errors import EpisodeError, MeshError, RetryableError
from offbeat.services.generation.config import GeneratingArgs
from offbeat.services.messages.codec import request_id
from offbeat.services.messages.types import (
    Completion,
    GenerateRequest,
    PromptImage,
    Sampling,
)
from offbeat.services.rollout.config import WorkerSettings
from offbeat.services.rollout.episodes.routing import EpisodeRouting
from offbeat.services.rollout.episodes.turn_batcher import TurnBatcher

BASELINE = "baseline"
"""Sampling of an episode with which those of its group are compared: their limits, at temperature 0."""
INITIAL_RETRY_WAIT_S, MAX_RETRY_WAIT_S = 0.05, 1.0


def build_samplings(settings: WorkerSettings, stop_ids: tuple[int, ...]) -> dict[str, Sampling]:
    """Return settings by `EpisodeTask.sampling_name`, and those of training's greedy baselines."""
    train = settings.generating_args
    sampled = settings.val_env_manager.generating_args.for_evaluation(train)
    greedy = GeneratingArgs(temperature=0.0, max_new_tokens=sampled.max_new_tokens, stop_strings=sampled.stop_strings)
    baseline = GeneratingArgs(temperature=0.0, max_new_tokens=train.max_new_tokens, stop_strings=train.stop_strings)
    return {
        name: Sampling(args.temperature, args.top_p, args.top_k, args.max_new_tokens, stop_ids, args.stop_strings)
        for name, args in (("train", train), ("sampled", sampled), ("greedy", greedy), (BASELINE, baseline))
    }


@lru_cache
def limit_new_tokens(sampling: Sampling, max_new_tokens: int) -> Sampling:
    """Return a cached `Sampling`."""
    return replace(sampling, max_new_tokens=max_new_tokens)


@lru_cache
def stop_at(sampling: Sampling, stop_strings: tuple[str, ...]) -> Sampling:
    """Return a cached `Sampling` with further stop strings."""
    return replace(sampling, stop_strings=(*sampling.stop_strings, *stop_strings))


class EpisodeSampler:
    """Context manager, at whose end the episode is over."""

    __slots__ = (
        "_batcher",
        "_continues",
        "_group",
        "_is_over",
        "_min_version",
        "_name",
        "_num_requests",
        "_retry_s",
        "_routing",
        "_sampling",
    )

    def __init__(
        self,
        batcher: TurnBatcher,
        sampling: Sampling,
        min_version: int,
        *,
        retry_s: float,
        continues: bool = True,
        group: str = "",
    ) -> None:
        """continues, group: as of `GenerateRequest`."""
        self._batcher = batcher
        self._sampling = sampling
        self._min_version = min_version
        self._retry_s = retry_s
        self._continues = continues
        self._group = group
        self._name = uuid.uuid4().hex[:16]
        self._num_requests = 0
        self._routing = EpisodeRouting()
        self._is_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._batcher.forget(self._name)

    async def __call__(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        images: tuple[PromptImage, ...] = (),
        *,
        stop_strings: tuple[str, ...] = (),
    ) -> Completion:
        """Sample, retrying for `retry_s`. stop_strings: besides those of the run.

        Raises:
            EpisodeError: `generation_refused`; `generation_unavailable` or `generation_timeout` after `retry_s`.
        """
        now = self._batcher.clock.time
        began, wait_s = now(), INITIAL_RETRY_WAIT_S
        while True:
            try:
                known = self._routing.known(prompt)
                request = self._request(prompt, max_new_tokens, images, stop_strings)
                if known is not None:
                    request = replace(request, routing_start=len(known))
                return self._routing.complete(prompt, known, await self._batcher.sample(request))
            except TimeoutError as error:
                failure = EpisodeError("generation_timeout", f"{error}, repeatedly")
            except RetryableError as error:
                failure = EpisodeError("generation_unavailable", str(error))
            except MeshError as error:
                raise EpisodeError("generation_refused", str(error)) from error
            if now() - began + wait_s > self._retry_s:
                raise failure
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_RETRY_WAIT_S)

    def _request(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        images: tuple[PromptImage, ...],
        stop_strings: tuple[str, ...],
    ) -> GenerateRequest:
        if self._sampling.max_new_tokens != max_new_tokens:
            self._sampling = limit_new_tokens(self._sampling, max_new_tokens)
        sampling = stop_at(self._sampling, stop_strings) if stop_strings else self._sampling
        name = request_id(self._name, self._num_requests, continues=self._continues)
        self._num_requests += 1
        episode = "" if self._is_over else self._name  # over: an agent's late call
        continues = self._continues and not self._is_over
        return GenerateRequest(name, prompt, sampling, self._min_version, images, episode, continues, self._group)
