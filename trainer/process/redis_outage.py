"""A learner whose Redis does not answer, or refuses writes, waits inside, and says what it waits for.

Ending would help nobody: the next learner would find the same Redis, and repeat the steps since the newest checkpoint.
"""

import logging
import time
from collections.abc import Callable

from offbeat.services.redis.errors import complaint

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""A call that took so long is an outage; it is waited out silently up to then."""
TELL_EVERY_S = 60.0
OVER_S = 30.0
"""A complaint that comes so long after the last one is of another outage."""


class RedisOutage:
    """Asked by a client between its tries, in whichever thread calls it."""

    def __init__(self, wanted: Callable[[], bool], sign: Callable[[], None], say: Callable[[str], None]) -> None:
        """wanted: whether the learner is to wait on. sign: the main thread comes on, or waits for one that waits here. say:
        tells people."""
        self._wanted = wanted
        self._sign = sign
        self._say = say
        self._began = self._last = self._told = float("-inf")

    def should_retry(self, error: Exception) -> bool:
        """Whether to try again after `error`."""
        self._sign()
        now = time.monotonic()
        if now > self._last + OVER_S:
            self._began, self._told = now - PATIENCE_S, float("-inf")
            self._say(f"Waiting: {complaint(error).rstrip('.')}. Training goes on once Redis can be used again.")
        self._last = now
        if now > self._told + TELL_EVERY_S:
            self._told = now
            logger.error("has waited for %.0f s, and waits on: %s", now - self._began, complaint(error))
        return self._wanted()
