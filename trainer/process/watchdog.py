"""Ends a learner whose main thread comes no further, so that another one takes the run.

Its lease would live on: a thread of its own renews that.

Invariant: time in which the watching thread itself did not run (the process was stopped, or starved) accuses nobody.
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
"""Between two looks; of the time between two that lie further apart, twice as much counts."""


class Watchdog:
    """Counts for how long a thread has given no sign that it comes on."""

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """limit_s: without a sign for so long it hangs; up to the first sign it has `START_S`, if that is more."""
        self._limit_s = limit_s
        self._clock = clock
        self._signed = threading.Event()
        self._allowed_s = max(limit_s, START_S)
        self._looked_at = clock()
        self._silent_s = 0.0

    def sign(self) -> None:
        """The thread comes on; costs a fraction of a microsecond."""
        self._signed.set()

    def hung_s(self) -> float:
        """For how long it has hung, s; 0 while it does not. Called about every `CHECK_INTERVAL_S`."""
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
    """End this process with `EXIT_HUNG` should this thread hang inside; the log then tells where."""
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
