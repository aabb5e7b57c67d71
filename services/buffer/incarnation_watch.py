"""Reconciliation while the learner computes."""

import logging

from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.errors import MeshError
from offbeat.services.threads import Follower

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
"""Interval of checks for lost data."""


class IncarnationWatch(Follower):
    def __init__(self, buffer: RedisLearnerBuffer) -> None:
        self._buffer = buffer
        super().__init__("incarnation")

    def _follow(self) -> None:
        while not self._stop.wait(CHECK_INTERVAL_S):
            try:
                self._buffer.reconcile_if_needed()
            except MeshError as error:  # the learner's own thread meets it, too, and decides
                logger.warning("the run's data could not be reconciled: %s", error)
