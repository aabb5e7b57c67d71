"""Wait status of episodes, reported as counts, and the share of a core that their worker takes."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from offbeat.services.messages.types import EpisodeKind, EpisodeTask


class Wait(StrEnum):
    PLACE = "place"
    """An env of the pool."""
    ENV = "env"
    AGENT = "agent"
    GENERATION = "generation"
    REWARD = "reward"
    """Scores of a finished answer."""
    BUFFER = "buffer"


class CpuShare:
    """Cores that this process uses, 1 of one that computes all the time in one thread."""

    def __init__(self) -> None:
        self._at, self._cpu_s = time.monotonic(), time.process_time()

    def take(self) -> float:
        """Return the mean since the last call."""
        (began, spent_s), self._at, self._cpu_s = (self._at, self._cpu_s), time.monotonic(), time.process_time()
        return (self._cpu_s - spent_s) / (self._at - began) if self._at > began else 0.0


@dataclass(slots=True)
class Waiting:
    wait: Wait
    since: float
    """Unix time."""
    clock: Callable[[], float]

    def enter(self, wait: Wait) -> None:
        self.wait, self.since = wait, self.clock()


@dataclass
class Waits:
    clock: Callable[[], float] = time.time
    _episodes: dict[EpisodeTask, Waiting] = field(default_factory=dict[EpisodeTask, Waiting])

    def begin(self, task: EpisodeTask) -> Waiting:
        """Add an episode; the caller updates the status."""
        self._episodes[task] = Waiting(Wait.PLACE, self.clock(), self.clock)
        return self._episodes[task]

    def leave(self, task: EpisodeTask) -> None:
        self._episodes.pop(task, None)

    def report(self) -> Mapping[str, Any]:
        """Return `at` (Unix time), `groups` and `evaluations`: number or id -> wait -> [episodes, earliest start]."""
        groups: dict[str, dict[str, list[float]]] = {}
        evaluations: dict[str, dict[str, list[float]]] = {}
        for task, episode in self._episodes.items():
            train = task.kind is EpisodeKind.TRAIN
            waits = (groups if train else evaluations).setdefault(str(task.number) if train else task.group_id, {})
            count, earliest = waits.get(episode.wait.value, (0, episode.since))
            waits[episode.wait.value] = [count + 1, min(earliest, episode.since)]
        return {"at": self.clock(), "groups": groups, "evaluations": evaluations}
