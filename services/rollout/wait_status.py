"""Wait status of episodes, reported as counts, and the share of a core that their worker takes."""

import time
from collections import deque
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

    def __init__(self, num_calls: int) -> None:
        self._marks = deque([(time.monotonic(), time.process_time())], maxlen=num_calls + 1)

    def take(self) -> float:
        """Return the mean over the last `num_calls` calls."""
        self._marks.append((time.monotonic(), time.process_time()))
        (began, spent_s), (now, cpu_s) = self._marks[0], self._marks[-1]
        return (cpu_s - spent_s) / (now - began) if now > began else 0.0


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
