"""Learner's wait for an unreachable or read-only Redis; the next learner would find the same."""

import logging
import threading
import time
from collections.abc import Sequence

from offbeat.services.redis.errors import complaint
from offbeat.trainer.learner.progress_view import LearnerView
from offbeat.trainer.watchdog import Watchdog

logger = logging.getLogger(__name__)

RETRY_TIMEOUT_S = 30.0
"""Duration of an outage's failures."""
LOG_INTERVAL_S = 60.0
NEW_OUTAGE_AFTER_S = 30.0
"""Error-free time that ends an outage."""


class RedisOutage:
    def __init__(self, stops: Sequence[threading.Event], watchdog: Watchdog, view: LearnerView) -> None:
        """stops: end the wait."""
        self._stops = stops
        self._watchdog = watchdog
        self._view = view
        self._began = self._last_error_at = self._logged_at = float("-inf")

    def should_retry(self, error: Exception) -> bool:
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
