"""Learner's wait for Redis, or a store, that is unreachable or refuses writes; the next learner would find the same."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from offbeat.trainer.learner.progress_view import LearnerView
from offbeat.trainer.watchdog import Watchdog

logger = logging.getLogger(__name__)

RETRY_TIMEOUT_S = 30.0
"""Time for which the Redis client retries by itself before it reports a failure."""
LOG_INTERVAL_S = 60.0
NEW_OUTAGE_AFTER_S = 30.0
"""Default time without an error that ends an outage."""


class Outage:
    """Outages of one service, reported once each; the wait counts as progress for the watchdog."""

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
        """stops: end the wait. failure_s: the client's retries before a failure. new_after_s: time without a failure that
        ends an outage.
        """
        self._service = service
        self._stops = stops
        self._watchdog = watchdog
        self._view = view
        self._describe = describe
        self._failure_s = failure_s
        self._new_after_s = new_after_s
        self._began = self._last_error_at = self._logged_at = float("-inf")

    def should_retry(self, error: Exception) -> bool:
        """Report a failure; return False once the learner should stop."""
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
