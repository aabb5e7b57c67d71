"""Outcomes of a worker's episodes, to detect broken envs and agents."""

import traceback
from collections import deque
from collections.abc import Mapping
from typing import Any

from offbeat.services.errors import EpisodeError, escape_surrogates
from offbeat.services.reward.errors import RewardError
from offbeat.services.rollout.data.source import BAD_ROW, DATASET_KEY
from offbeat.services.rollout.tasks import BAD_TASK, SAMPLER_KEY

REWARDS_KEY = "rewards"

WINDOW = 64
MIN_FAILURES = 16
"""Without a success."""
MAX_TRACE_CHARS = 4000


class EpisodeOutcomes:
    def __init__(self, group_size: int) -> None:
        self._limit = max(2 * group_size, MIN_FAILURES)
        self.num_finished = 0
        """Episodes that were submitted."""
        self._num_failed = 0
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._last: dict[str, str] = {}

    def finished(self) -> None:
        self.num_finished += 1
        self._recent.append(True)

    def failed(self, key: str, error: Exception) -> None:
        """Count a failure of env, agent, row or reward. key: configuration key to change."""
        if isinstance(error, EpisodeError) and error.reason.startswith("generation"):
            return
        self._num_failed += 1
        self._recent.append(False)
        last = {"key": key, "error": str(error), "trace": _trace(error)[-MAX_TRACE_CHARS:]}
        self._last = {name: escape_surrogates(text) for name, text in last.items()}

    def report(self) -> Mapping[str, Any]:
        """Return counts, also of the last `WINDOW`, the `limit` of failures, and the last failure."""
        return {
            "finished": self.num_finished,
            "failed": self._num_failed,
            "recent": len(self._recent),
            "recent_failed": self._recent.count(False),
            "limit": self._limit,
            **self._last,
        }


def key_of(error: Exception, tag: str) -> str:
    """Return the configuration key that may fix a failure."""
    if isinstance(error, EpisodeError) and error.reason == BAD_ROW:
        return DATASET_KEY
    if isinstance(error, EpisodeError) and error.reason == BAD_TASK:
        return SAMPLER_KEY
    return REWARDS_KEY if isinstance(error, RewardError) else f"custom_envs.{tag}"


def _trace(error: Exception) -> str:
    if isinstance(error, EpisodeError) and error.trace:
        return error.trace
    cause = error.__cause__ or error
    return "".join(traceback.format_exception(cause))
