"""How often somebody may do something: a bucket of tokens that fills at a constant rate."""

import time
from collections.abc import Callable


class Bucket:
    """Lets `burst` calls through at once, and `per_s` in the long run."""

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._left = float(burst)
        self._at = clock()

    def take(self) -> float:
        """Take one: 0 if there was one, else the seconds until there will be."""
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return (1 - self._left) / self._per_s
        self._left -= 1
        return 0.0
