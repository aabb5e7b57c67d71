"""Watchdog of the main thread, as the lease's renewal thread survives a hang.

Invariant: time in which the watchdog was descheduled does not count.
"""

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

EXIT_HUNG = 5
CHECK_INTERVAL_S = 0.5
"""A longer gap counts at most twice."""
STARTUP_TIMEOUT_S = 600.0
"""Until the first kick, after the import of torch."""


class Watchdog:
    def __init__(self, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """timeout_s: without progress; at least `STARTUP_TIMEOUT_S` until the first kick."""
        self._timeout_s = timeout_s
        self._clock = clock
        self._kicked = threading.Event()
        self._allowed_s = max(timeout_s, STARTUP_TIMEOUT_S)
        self._checked_at = clock()
        self._silent_s = 0.0

    def kick(self) -> None:
        """Record progress (< 1 µs)."""
        self._kicked.set()

    def hung_s(self) -> float:
        """Return the seconds hung, or 0; to be called about every `CHECK_INTERVAL_S`."""
        now = self._clock()
        elapsed_s, self._checked_at = min(now - self._checked_at, 2 * CHECK_INTERVAL_S), now
        if self._kicked.is_set():
            self._kicked.clear()
            self._silent_s, self._allowed_s = 0.0, self._timeout_s
        else:
            self._silent_s += elapsed_s
        return self._silent_s if self._silent_s > self._allowed_s else 0.0


@contextmanager
def kill_if_hung(watchdog: Watchdog) -> Iterator[None]:
    """Log the stack and exit with `EXIT_HUNG` if the calling thread hangs in the block."""
    thread_id, left = threading.get_ident(), threading.Event()

    def watch() -> None:
        while not left.wait(CHECK_INTERVAL_S):
            if hung_s := watchdog.hung_s():
                stack = "".join(traceback.format_stack(sys._current_frames().get(thread_id)))
                logger.error("the main thread has made no progress for %.0f s: exiting; it is at\n%s", hung_s, stack)
                logging.shutdown()
                os._exit(EXIT_HUNG)

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()
