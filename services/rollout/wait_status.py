"""What the episodes of a worker wait for at this moment, for whoever asks why a run does not get further.

Invariant: an episode waits for exactly one thing; what the worker says is a count of them, never the episodes themselves.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from offbeat.services.messages.types import EpisodeKind, EpisodeTask


class Wait(StrEnum):
    """What an episode waits for."""

    PLACE = "place"
    """An env of the pool."""
    ENV = "env"
    AGENT = "agent"
    """The agent that plays it thinks, or is busy elsewhere."""
    GENERATION = "generation"
    BUFFER = "buffer"
    """Its trajectory is handed in."""


@dataclass(slots=True)
class Waiting:
    """What one episode waits for."""

    wait: Wait
    since: float
    """Unix time."""
    clock: Callable[[], float]

    def enter(self, wait: Wait) -> None:
        """The episode waits for this from now on."""
        self.wait, self.since = wait, self.clock()


@dataclass
class Waits:
    """Kept up to date by the worker."""

    clock: Callable[[], float] = time.time
    _of: dict[EpisodeTask, Waiting] = field(default_factory=dict[EpisodeTask, Waiting])

    def begin(self, task: EpisodeTask) -> Waiting:
        """The episode waits for its place; the rest is told to what comes back."""
        self._of[task] = Waiting(Wait.PLACE, self.clock(), self.clock)
        return self._of[task]

    def leave(self, task: EpisodeTask) -> None:
        """The episode is over."""
        self._of.pop(task, None)

    def report(self) -> Mapping[str, Any]:
        """`at`: Unix time; `groups` and `evaluations`: number or id -> wait -> [episodes, since when the longest]."""
        groups: dict[str, dict[str, list[float]]] = {}
        evaluations: dict[str, dict[str, list[float]]] = {}
        for task, episode in self._of.items():
            train = task.kind is EpisodeKind.TRAIN
            of_unit = (groups if train else evaluations).setdefault(str(task.number) if train else task.group_id, {})
            count, longest = of_unit.get(episode.wait.value, (0, episode.since))
            of_unit[episode.wait.value] = [count + 1, min(longest, episode.since)]
        return {"at": self.clock(), "groups": groups, "evaluations": evaluations}
