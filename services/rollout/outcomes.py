"""Outcomes of a worker's episodes, by which broken envs and agents are recognized."""

import traceback
from collections import deque
from collections.abc import Mapping
from typing import Any

from offbeat.services.errors import EpisodeError

WINDOW = 64
"""Most recent episodes."""
MIN_FAILURES = 16
"""Fewest failures, without a success, after which an env or agent counts as broken."""
MAX_TRACE_CHARS = 4000


class EpisodeOutcomes:
    """Counts of finished and failed episodes, and the last failure."""

    def __init__(self, group_size: int) -> None:
        self._limit = max(2 * group_size, MIN_FAILURES)
        self._num_finished = self._num_failed = 0
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._last: dict[str, str] = {}

    def finished(self) -> None:
        self._num_finished += 1
        self._recent.append(True)

    def failed(self, tag: str, error: Exception) -> None:
        """Count a failure of env or agent; those of generation are not theirs."""
        if isinstance(error, EpisodeError) and error.reason.startswith("generation"):
            return
        self._num_failed += 1
        self._recent.append(False)
        self._last = {"tag": tag, "error": str(error), "trace": _trace(error)[-MAX_TRACE_CHARS:]}

    def report(self) -> Mapping[str, Any]:
        """Return counts, also of the last `WINDOW` episodes, the `limit` of failures, and the last failure."""
        return {
            "finished": self._num_finished,
            "failed": self._num_failed,
            "recent": len(self._recent),
            "recent_failed": self._recent.count(False),
            "limit": self._limit,
            **self._last,
        }


def _trace(error: Exception) -> str:
    """Return the traceback of what the env or agent raised."""
    if isinstance(error, EpisodeError) and error.trace:
        return error.trace
    cause = error.__cause__ or error
    return "".join(traceback.format_exception(cause))
