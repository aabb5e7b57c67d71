"""Kills a learner whose main thread is stuck, so that a replacement can take over.

The lease alone does not notice: its renewal thread keeps running.

Invariant: time in which the watchdog thread itself was descheduled (process stopped or starved) does not count.
"""

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from offbeat.trainer.process.heartbeat import START_S

logger = logging.getLogger(__name__)

EXIT_HUNG = 5
"""Exit code of a process that was ended for this."""
CHECK_INTERVAL_S = 0.5
"""Interval of checks; of a longer gap between two checks, at most twice the interval counts."""


class Watchdog:
    """Measures how long a thread has made no progress."""

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """limit_s: time without progress after which the thread counts as hung; until the first kick at least `START_S`."""
        self._limit_s = limit_s
        self._clock = clock
        self._signed = threading.Event()
        self._allowed_s = max(limit_s, START_S)
        self._looked_at = clock()
        self._silent_s = 0.0

    def sign(self) -> None:
        """Record progress (well under 1 µs)."""
        self._signed.set()

    def hung_s(self) -> float:
        """Return the seconds hung, or 0. Call about every `CHECK_INTERVAL_S`."""
        now = self._clock()
        passed, self._looked_at = min(now - self._looked_at, 2 * CHECK_INTERVAL_S), now
        if self._signed.is_set():
            self._signed.clear()
            self._silent_s, self._allowed_s = 0.0, self._limit_s
        else:
            self._silent_s += passed
        return self._silent_s if self._silent_s > self._allowed_s else 0.0


@contextmanager
def kill_if_hung(dog: Watchdog) -> Iterator[None]:
    """Exit with `EXIT_HUNG` and log the stack if the calling thread hangs inside the block."""
    watched_thread, over = threading.get_ident(), threading.Event()

    def watch() -> None:
        while not over.wait(CHECK_INTERVAL_S):
            if hung_s := dog.hung_s():
                where = "".join(traceback.format_stack(sys._current_frames().get(watched_thread)))
                logger.error("the main thread has come no further for %.0f s: ends. It is at\n%s", hung_s, where)
                logging.shutdown()
                os._exit(EXIT_HUNG)

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
