"""Which tag and seed the next training group plays, where that depends on how earlier ones went.

A sampler is named by class path (`train_env_manager.task_sampler`) and made with the tags and its `args` on every worker and
on the learner. The learner tells it of each group that it trains, and keeps its state in checkpoints; workers draw by it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np


class TaskSampler(Protocol):
    """What a class for `task_sampler` has; it is made as `Class(tags, **args)`."""

    def draw(self, rng: np.random.Generator) -> tuple[str, int | None]:
        """A tag, and a seed below 2**31 for its env, or None for any. By `rng` and the state alone."""
        ...

    def learn(self, tag: str, seed: int, rewards: Sequence[float], successes: Sequence[float]) -> None:
        """A group was trained: reward and `success` of each of its episodes."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What it has learnt, as JSON can say it."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo `state_dict`."""
        ...


class Levels:
    """From the first tag to the last: the next begins when the newest one is mastered, and earlier ones stay in play."""

    def __init__(self, tags: Sequence[str], *, at: float = 0.8, window: int = 16, review: float = 0.2) -> None:
        """at: mean success of the newest level's last `window` groups with which the next begins; review: share of groups
        that play one of the levels before.

        Raises:
            ValueError: a setting that can't be.
        """
        if not 0 < at <= 1 or window < 1 or not 0 <= review < 1:
            raise ValueError(
                f"Levels takes at in (0, 1], window from 1, review in [0, 1); got {at}, {window}, {review}"
            )
        self._tags = tuple(tags)
        self._at, self._window, self._review = at, window, review
        self._level = 0
        self._seen: list[float] = []

    def draw(self, rng: np.random.Generator) -> tuple[str, int | None]:
        """See `TaskSampler.draw`."""
        back = self._level and rng.random() < self._review
        return self._tags[int(rng.integers(self._level)) if back else self._level], None

    def learn(self, tag: str, seed: int, rewards: Sequence[float], successes: Sequence[float]) -> None:  # noqa: ARG002
        """See `TaskSampler.learn`."""
        if tag != self._tags[self._level] or not successes:
            return
        self._seen = [*self._seen, sum(successes) / len(successes)][-self._window :]
        mastered = len(self._seen) == self._window and sum(self._seen) / self._window >= self._at
        if mastered and self._level + 1 < len(self._tags):
            self._level, self._seen = self._level + 1, []

    def state_dict(self) -> dict[str, Any]:
        """See `TaskSampler.state_dict`."""
        return {"level": self._level, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `TaskSampler.load_state_dict`."""
        self._level, self._seen = min(int(state["level"]), len(self._tags) - 1), [float(x) for x in state["seen"]]
