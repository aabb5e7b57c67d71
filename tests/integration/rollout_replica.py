"""A generation replica on Ray Serve without an engine: answers each turn with a direction that the prompt decides."""

import asyncio
import os
from collections.abc import AsyncIterator

from ray import serve
from ray.serve import Application

from offbeat.services.generation.client import DEPLOYMENT
from offbeat.services.generation.request_router import AwakeReplicaRouter
from offbeat.services.messages.codec import decode_requests, encode_completions
from offbeat.services.messages.types import Completion, GenerateRequest, VersionSpan

STEP_S = 0.005


class Walker:
    """Same service, same name and same bytes as the real one."""

    def __init__(self, words: tuple[int, ...], end: int, delay_s: float) -> None:
        self._words = words
        self._end = end
        self._delay_s = delay_s

    async def generate(self, blob: bytes) -> AsyncIterator[bytes]:
        """Half of the turns a little later than the others."""
        requests = decode_requests(blob)
        for part in (requests[::2], requests[1::2]):
            if part:
                await asyncio.sleep(self._delay_s)
                yield encode_completions([self._answer(request) for request in part])

    async def abort(self, request_ids: list[str]) -> None:
        """Nothing is running for long."""

    async def pid(self) -> int:
        """The replica's process."""
        return os.getpid()

    def _answer(self, request: GenerateRequest) -> Completion:
        """Answer; the word's logprob names the process."""
        word = self._words[sum(request.prompt) % len(self._words)]
        logprobs = (-float(os.getpid()), -0.1)
        return Completion(request.request_id, (word, self._end), logprobs, (VersionSpan(0, 2, request.min_version),))


def build_walker(words: tuple[int, ...], end: int, *, delay_s: float = STEP_S, num_replicas: int = 1) -> Application:
    """The application."""
    deployment = serve.deployment(
        Walker,
        name=DEPLOYMENT,
        num_replicas=num_replicas,
        max_ongoing_requests=1000,
        request_router_config={"request_router_class": AwakeReplicaRouter},
        ray_actor_options={"num_cpus": 0.1},
        health_check_period_s=1,
        logging_config={"enable_access_log": False},
    )
    return deployment.bind(words, end, delay_s)
