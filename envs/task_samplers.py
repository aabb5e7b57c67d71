"""Task samplers, which choose the next training group's tag and seed.

`train_env_manager.task_sampler` is constructed on the learner, which reports trained groups and checkpoints the state,
and on every worker, which draws from it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np


class TaskSampler(Protocol):
    """Protocol of a task sampler, constructed as `Class(tags, **args)`; the state is JSON values.

    class Uniform:
        def __init__(self, tags):
            self.tags = tags

        def draw(self, rng):
            return self.tags[int(rng.integers(len(self.tags)))], None

        def learn(self, tag, seed, rewards, successes): ...

        def state_dict(self):
            return {}

        def load_state_dict(self, state): ...
    """

    def draw(self, rng: np.random.Generator) -> tuple[str, int | None]:
        """Return a tag, and a seed below 2**31 or None for any; determined by `rng` and state."""
        ...

    def learn(self, tag: str, seed: int, rewards: Sequence[float], successes: Sequence[float]) -> None:
        """Learn from a trained group: each episode's reward and `success`."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Levels:
    """Curriculum over tags in order: mastering the newest unlocks the next."""

    def __init__(self, tags: Sequence[str], *, at: float = 0.8, window: int = 16, review: float = 0.2) -> None:
        """at: mean success over the newest tag's last `window` groups that unlocks the next. review: share of earlier tags.

        Raises ValueError for a setting out of range.
        """
        if not 0 < at <= 1 or window < 1 or not 0 <= review < 1:
            raise ValueError(
                f"Levels takes at in (0, 1], window from 1, review in [0, 1); got {at}, {window}, {review}"
            )
        self._tags = tuple(tags)
        self._at, self._window, self._review = at, window, review
        self._level = 0
        self._successes: list[float] = []

    def draw(self, rng: np.random.Generator) -> tuple[str, int | None]:
        is_review = self._level and rng.random() < self._review
        return self._tags[int(rng.integers(self._level)) if is_review else self._level], None

    def learn(self, tag: str, seed: int, rewards: Sequence[float], successes: Sequence[float]) -> None:  # noqa: ARG002
        if tag != self._tags[self._level] or not successes:
            return
        self._successes = [*self._successes, sum(successes) / len(successes)][-self._window :]
        mastered = len(self._successes) == self._window and sum(self._successes) / self._window >= self._at
        if mastered and self._level + 1 < len(self._tags):
            self._level, self._successes = self._level + 1, []

    def state_dict(self) -> dict[str, Any]:
        return {"level": self._level, "seen": self._successes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._level, self._successes = min(int(state["level"]), len(self._tags) - 1), [float(x) for x in state["seen"]]
