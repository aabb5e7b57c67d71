"""Clock that excludes the time in which all engines sleep, for timeouts that must not count it."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class AwakeClock:
    """Clock that stands still while stopped, with the limits that it governs."""

    def __init__(self) -> None:
        self._num_stops = 0
        self._stopped_at = 0.0
        self._lost_s = 0.0
        self._deadlines: dict[asyncio.Timeout, float] = {}
        """Of entered limits, on this clock."""

    def time(self) -> float:
        return (self._stopped_at if self._num_stops else time.monotonic()) - self._lost_s

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock; of overlapping stops, the first begins and the last ends it."""
        if not self._num_stops:
            self._stopped_at = time.monotonic()
        self._num_stops += 1
        self._reschedule()
        try:
            yield
        finally:
            self._num_stops -= 1
            if not self._num_stops:
                self._lost_s += time.monotonic() - self._stopped_at
                self._reschedule()

    @contextmanager
    def limited(self, limit: asyncio.Timeout, seconds: float) -> Iterator[None]:
        """Let an entered limit expire after `seconds` of this clock."""
        deadline = self._deadlines[limit] = self.time() + seconds
        self._schedule(limit, deadline)
        try:
            yield
        finally:
            del self._deadlines[limit]

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """Limit a block as `asyncio.timeout` does, by this clock."""
        async with asyncio.timeout(None) as limit:
            with self.limited(limit, seconds):
                yield

    def _reschedule(self) -> None:
        for limit, deadline in self._deadlines.items():
            if not limit.expired():
                self._schedule(limit, deadline)

    def _schedule(self, limit: asyncio.Timeout, deadline: float) -> None:
        now = asyncio.get_running_loop().time()
        limit.reschedule(None if self._num_stops else now + deadline - self.time())
