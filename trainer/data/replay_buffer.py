"""Replay buffer of trained groups.

Invariants: a group is in at most `max_times_sampled` batches, its first included, within its staleness bound; selection
depends only on seed, step and checkpointed entries. Admission counts only first uses.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgpack
import numpy as np
import numpy.typing as npt

from offbeat.services.messages.types import Group
from offbeat.trainer.config.replay import ReplayConfig
from offbeat.trainer.data.group_codec import pack_group, unpack_group
from offbeat.trainer.data.seats import reward_deviation

REPLAY_FILE = Path("state", "replay.msgpack")
SEED_STREAM = 0x4E91A7
"""Distinct from other uses of the seed."""

MIN_SCORE = 1e-12
"""Of a group over the largest one, so that each may be drawn under any `priority_exponent`."""


@dataclass(frozen=True, slots=True)
class ReplayEntry:
    group: Group
    times: int = 1

    @property
    def priority(self) -> float:
        """Return the standard deviation of its rewards."""
        return reward_deviation(self.group)


@dataclass(frozen=True, slots=True)
class ReplayedGroups:
    """Old groups in a batch, with loss weights."""

    groups: tuple[Group, ...] = ()
    weights: tuple[float, ...] = ()


NO_REPLAY = ReplayedGroups()


class ReplayBuffer:
    """Oldest first."""

    def __init__(self, config: ReplayConfig, groups_per_step: int, seed: int) -> None:
        self._config = config
        self._groups_per_step = groups_per_step
        self._seed = seed
        self._entries: list[ReplayEntry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def select(self, step: int, max_staleness: float) -> ReplayedGroups:
        """Select old groups for batch `step` (0-based)."""
        num_due = self._num_due(step)
        eligible = [entry for entry in self._entries if self._is_eligible(entry, step, max_staleness)]
        if not num_due or not eligible:
            return NO_REPLAY
        count = min(num_due, len(eligible))
        rng = np.random.default_rng([self._seed, SEED_STREAM, step])
        probabilities = self._probabilities(eligible)
        match self._config.sampler:
            case "fifo":
                indexes = list(range(count))
            case "lifo":
                indexes = list(range(len(eligible) - count, len(eligible)))
            case _:
                indexes = sorted(rng.choice(len(eligible), count, replace=False, p=probabilities).tolist())
        weights = self._weights(probabilities[indexes], len(eligible))
        return ReplayedGroups(tuple(eligible[i].group for i in indexes), weights)

    def update(self, fresh: Sequence[Group], replayed: ReplayedGroups) -> None:
        if self._config.samples_per_insert is None:
            return
        reused = {group.number for group in replayed.groups}
        entries = [replace(entry, times=entry.times + (entry.group.number in reused)) for entry in self._entries]
        entries += [ReplayEntry(group) for group in fresh]
        reusable = [entry for entry in entries if entry.times < self._config.max_times_sampled]
        self._entries = reusable[-self._config.max_size :]

    def save(self, folder: Path) -> None:
        rows = [[entry.times, pack_group(entry.group)] for entry in self._entries]
        (folder / REPLAY_FILE).parent.mkdir(exist_ok=True)
        (folder / REPLAY_FILE).write_bytes(cast(bytes, msgpack.packb(rows)))

    def load(self, folder: Path, can_train: Callable[[Group], bool] = lambda _: True) -> None:
        """Load a checkpoint's trainable entries, if any."""
        path = folder / REPLAY_FILE
        rows = cast(list[Any], msgpack.unpackb(path.read_bytes())) if path.is_file() else []
        entries = [ReplayEntry(unpack_group(body), times) for times, body in rows]
        self._entries = [entry for entry in entries if can_train(entry.group)]

    def _num_due(self, step: int) -> int:
        if self._config.samples_per_insert is None:
            return 0
        rate = (self._config.samples_per_insert - 1) * self._groups_per_step
        return math.floor(rate * (step + 1)) - math.floor(rate * step)

    def _is_eligible(self, entry: ReplayEntry, step: int, max_staleness: float) -> bool:
        bound = max_staleness if self._config.max_staleness is None else self._config.max_staleness
        return step - entry.group.oldest_version < bound + 1  # lags are whole numbers of versions

    def _probabilities(self, entries: Sequence[ReplayEntry]) -> npt.NDArray[np.float64]:
        if self._config.sampler != "prioritized":
            return np.full(len(entries), 1.0 / len(entries))
        priorities = np.array([entry.priority + 1e-6 for entry in entries])
        scores = (priorities / priorities.max()) ** self._config.priority_exponent
        scores = np.maximum(scores, MIN_SCORE)
        return scores / scores.sum()

    def _weights(self, probabilities: npt.NDArray[np.float64], size: int) -> tuple[float, ...]:
        if self._config.sampler != "prioritized":
            return (1.0,) * len(probabilities)
        weights = (1.0 / (size * probabilities)) ** self._config.importance_sampling_exponent
        return tuple((weights / weights.max()).tolist())
