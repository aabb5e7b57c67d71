"""Calls of one reward function.

Invariants: at most `max_concurrent` attempts run; an attempt ends within its timeout; equal samples share one call;
failures are not cached.
"""

import asyncio
import time
import traceback
from collections import Counter, OrderedDict
from hashlib import blake2b
from typing import Generic, cast

from offbeat.services.reward.errors import ATTEMPTED_AGAIN, Failure, RewardError
from offbeat.services.reward.function import (
    RewardFunction,
    SampleT,
    ValueT,
    count_hung,
    read_number,
    read_numbers,
)
from offbeat.services.reward.kinds.config import RewardConfig
from offbeat.services.reward.sample import GroupSample, encode_sample

RESULT = "its result"
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0


class RewardCaller(Generic[SampleT, ValueT]):
    def __init__(
        self,
        config: RewardConfig,
        function: RewardFunction[SampleT, ValueT],
        timeout_s: float | None = None,
        num_processes: int = 1,
    ) -> None:
        """timeout_s: of an attempt; None: the configured one. num_processes: over which `max_concurrent` is counted."""
        self._config = config
        self._function = function
        self._timeout_s = timeout_s or config.timeout_s
        self._slots = asyncio.Semaphore(config.max_concurrent * num_processes)
        self.failures = Counter[str]()
        """Attempts without a value, by reason."""
        self._cache: OrderedDict[bytes, ValueT] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[ValueT]] = {}

    @property
    def num_hung(self) -> int:
        return count_hung(self._function)

    async def score(self, sample: SampleT) -> ValueT:
        """Return a finite score; raises RewardError."""
        return await (self._score_cached(sample) if self._config.cache_size else self._score(sample))

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        await self._function.close()

    async def _score_cached(self, sample: SampleT) -> ValueT:
        key = self._digest(sample)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = asyncio.create_task(self._score(sample))
            running.add_done_callback(lambda done: self._keep(key, done))
        # Another caller may wait for it
        return await asyncio.shield(running)

    def _keep(self, key: bytes, done: "asyncio.Task[ValueT]") -> None:
        del self._running[key]
        if done.cancelled() or done.exception() is not None:
            return
        self._cache[key] = done.result()
        if len(self._cache) > self._config.cache_size:
            self._cache.popitem(last=False)

    def _digest(self, sample: SampleT) -> bytes:
        try:
            return blake2b(encode_sample(sample), digest_size=16).digest()
        except RewardError as error:
            raise self._named(error) from error

    async def _score(self, sample: SampleT) -> ValueT:
        async with self._slots:
            return await self._retry(sample)

    async def _retry(self, sample: SampleT) -> ValueT:
        deadline = time.monotonic() + self._config.max_retry_s
        num_attempts, wait_s = 1, FIRST_WAIT_S
        while True:
            try:
                return await run_attempt(self._function, sample, self._timeout_s)
            except RewardError as error:
                self.failures[error.failure.value] += 1
                if error.failure is Failure.UNAVAILABLE:
                    if time.monotonic() + wait_s > deadline:
                        raise self._named(error) from error
                elif error.failure in ATTEMPTED_AGAIN and num_attempts < self._config.max_attempts:
                    num_attempts += 1
                else:
                    raise self._named(error) from error
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _named(self, error: RewardError) -> RewardError:
        return RewardError(error.failure, f"reward {self._config.name}: {error.detail}", error.trace)


async def run_attempt(function: RewardFunction[SampleT, ValueT], sample: SampleT, timeout_s: float) -> ValueT:
    """Return finite scores in time; raises RewardError."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            value = await function.score(sample)
            is_group = isinstance(sample, GroupSample)
            read = read_numbers(value, len(sample.members), RESULT) if is_group else read_number(value, RESULT)
            return cast(ValueT, read)
    except RewardError:
        raise
    except TimeoutError as error:
        if not limit.expired():
            raise RewardError(Failure.ERROR, repr(error), traceback.format_exc()) from error
        raise RewardError(Failure.TIMEOUT, f"no score in {timeout_s:g} s") from None
    except Exception as error:  # a reward's error fails its episode
        raise RewardError(Failure.ERROR, repr(error), traceback.format_exc()) from error
