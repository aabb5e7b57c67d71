"""Queues and means of the simulation."""

import heapq


class Station:
    """First come, first served."""

    __slots__ = ("_free_at", "busy_s")

    def __init__(self) -> None:
        self._free_at = 0.0
        self.busy_s = 0.0

    def serve(self, now: float, seconds: float) -> float:
        """Return when a request that arrives now is done."""
        if not seconds:
            return now
        self._free_at = max(self._free_at, now) + seconds
        self.busy_s += seconds
        return self._free_at


class Servers:
    """First come, first served, by several servers."""

    __slots__ = ("_free_at",)

    def __init__(self, number: int) -> None:
        self._free_at = [0.0] * number
        """Heap."""

    def serve(self, now: float, seconds: float) -> float:
        """Return when a request that arrives now is done."""
        done = max(self._free_at[0], now) + seconds
        heapq.heapreplace(self._free_at, done)
        return done


class Average:
    """Mean over time of a step function."""

    __slots__ = ("_at", "_began", "_sum", "_value")

    def __init__(self) -> None:
        self._began = self._at = self._sum = self._value = 0.0

    def observe(self, now: float, value: float) -> None:
        self._sum += self._value * (now - self._at)
        self._at, self._value = now, value

    def restart(self, now: float) -> None:
        self.observe(now, self._value)
        self._began, self._sum = now, 0.0

    def mean(self, now: float) -> float:
        self.observe(now, self._value)
        return self._sum / (now - self._began) if now > self._began else self._value
