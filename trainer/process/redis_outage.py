"""Keeps the learner waiting while Redis is unreachable or read-only, and logs why.

Exiting would not help: the next learner would find the same Redis, and repeat the steps since the newest checkpoint.
"""

import logging
import time
from collections.abc import Callable

from offbeat.services.redis.errors import complaint

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""Duration from which a failing call counts as an outage; shorter ones are retried silently."""
TELL_EVERY_S = 60.0
OVER_S = 30.0
"""Pause after which the next error counts as a new outage."""


class RedisOutage:
    """Retry policy of Redis clients, called between retries in the thread of the call."""

    def __init__(self, wanted: Callable[[], bool], sign: Callable[[], None], say: Callable[[str], None]) -> None:
        """wanted: True while the learner should wait. sign: keeps the watchdog from firing. say: shows a message."""
        self._wanted = wanted
        self._sign = sign
        self._say = say
        self._began = self._last = self._told = float("-inf")

    def should_retry(self, error: Exception) -> bool:
        """Return True if the call should be retried after `error`."""
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
