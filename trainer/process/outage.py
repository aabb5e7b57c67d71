"""Learner's wait for an unreachable or read-only Redis or store; the next learner would find the same."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from offbeat.trainer.learner.progress_view import LearnerView
from offbeat.trainer.watchdog import Watchdog

logger = logging.getLogger(__name__)

RETRY_TIMEOUT_S = 30.0
"""Duration of a Redis outage's failures."""
LOG_INTERVAL_S = 60.0
NEW_OUTAGE_AFTER_S = 30.0
"""Time without a Redis error that ends an outage."""


class Outage:
    def __init__(
        self,
        service: str,
        stops: Sequence[threading.Event],
        watchdog: Watchdog,
        view: LearnerView,
        *,
        describe: Callable[[Exception], str] = str,
        failure_s: float = 0.0,
        new_after_s: float = NEW_OUTAGE_AFTER_S,
    ) -> None:
        """stops: end the wait. failure_s: time before the first failure. new_after_s: time without one that ends it."""
        self._service = service
        self._stops = stops
        self._watchdog = watchdog
        self._view = view
        self._describe = describe
        self._failure_s = failure_s
        self._new_after_s = new_after_s
        self._began = self._last_error_at = self._logged_at = float("-inf")

    def should_retry(self, error: Exception) -> bool:
        self._watchdog.kick()
        now = time.monotonic()
        if now > self._last_error_at + self._new_after_s:
            self._began, self._logged_at = now - self._failure_s, float("-inf")
            reason = self._describe(error).rstrip(".")
            self._view.print(f"{self._service} unavailable: {reason}. Training resumes when it is back.")
        self._last_error_at = now
        if now > self._logged_at + LOG_INTERVAL_S:
            self._logged_at = now
            logger.error("%s unavailable for %.0f s: %s", self._service, now - self._began, self._describe(error))
        return not any(stop.is_set() for stop in self._stops)
