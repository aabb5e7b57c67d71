"""Keeps the learner waiting while Redis is unreachable or read-only, and logs why.

Exiting would not help: the next learner would find the same Redis, and repeat the steps since the newest checkpoint.
"""

import logging
import threading
import time
from collections.abc import Sequence

from offbeat.services.redis.errors import complaint
from offbeat.trainer.learner.progress_view import LearnerView
from offbeat.trainer.watchdog import Watchdog

logger = logging.getLogger(__name__)

RETRY_TIMEOUT_S = 30.0
"""Duration from which a failing call counts as an outage; shorter ones are retried silently."""
LOG_INTERVAL_S = 60.0
NEW_OUTAGE_AFTER_S = 30.0
"""Time without errors after which the next one counts as a new outage."""


class RedisOutage:
    """Retry policy of Redis clients, called between retries in the thread of the call."""

    def __init__(self, stops: Sequence[threading.Event], watchdog: Watchdog, view: LearnerView) -> None:
        """stops: events that end the wait; an unusable Redis can't report the end of the run."""
        self._stops = stops
        self._watchdog = watchdog
        self._view = view
        self._began = self._last_error_at = self._logged_at = float("-inf")

    def should_retry(self, error: Exception) -> bool:
        """Return True if the call should be retried after `error`."""
        self._watchdog.kick()
        now = time.monotonic()
        if now > self._last_error_at + NEW_OUTAGE_AFTER_S:
            self._began, self._logged_at = now - RETRY_TIMEOUT_S, float("-inf")
            reason = complaint(error).rstrip(".")
            self._view.print(f"Redis unavailable: {reason}. Training resumes when it is back.")
        self._last_error_at = now
        if now > self._logged_at + LOG_INTERVAL_S:
            self._logged_at = now
            logger.error("Redis unavailable for %.0f s: %s", now - self._began, complaint(error))
        return not any(stop.is_set() for stop in self._stops)
