"""Unique requests, measured at fixed concurrency."""

import asyncio
import itertools
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from offbeat.services.messages.types import GenerateRequest, Sampling

PROMPT_TOKENS = 64

Call = Callable[[GenerateRequest], Awaitable[int]]
"""Returns the number of generated tokens."""


@dataclass(frozen=True, slots=True)
class RoundLoad:
    tokens_per_s: float
    p50_s: float
    p99_s: float


class Prompts:
    def __init__(self, vocab_size: int, tokens: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size
        self._sampling = Sampling(max_new_tokens=tokens)
        self._numbers = (f"{seed}-{number}" for number in itertools.count())

    def take(self, count: int) -> list[GenerateRequest]:
        return [self._make() for _ in range(count)]

    def _make(self) -> GenerateRequest:
        prompt = tuple(self._random.randrange(self._vocab_size) for _ in range(PROMPT_TOKENS))
        return GenerateRequest(next(self._numbers), prompt, self._sampling)


async def under_load(call: Call, requests: Sequence[GenerateRequest], concurrency: int) -> RoundLoad:
    waiting = iter(requests)
    latencies: list[float] = []
    tokens = 0

    async def client() -> None:
        nonlocal tokens
        for request in waiting:
            began = time.monotonic()
            count = await call(request)  # not `tokens += await ...`, which would add to what it was before
            tokens += count
            latencies.append(time.monotonic() - began)

    began = time.monotonic()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    wall_s = time.monotonic() - began
    return RoundLoad(tokens / wall_s, quantile(latencies, 0.5), quantile(latencies, 0.99))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank quantile."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]
