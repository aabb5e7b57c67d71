"""Groups that were trained on and may be again: which ones join a step's batch, and what they weigh there.

Invariants: a group joins at most `max_times_sampled` batches, its first counted, none twice, and none in which it lags more
than the bound; the choice depends on the run's seed, the step and what is kept, so a learner that goes on from a checkpoint,
which holds all of it, chooses as the dead one did. Buffer and admission know of first times only: a group is acknowledged
once, after a checkpoint in which it is kept here.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgpack
import numpy as np
import numpy.typing as npt

from offbeat.services.messages.types import Group
from offbeat.trainer.config.replay import ReplayConfig
from offbeat.trainer.data.group_codec import pack_group, unpack_group

FILE = Path("state", "replay.msgpack")
STREAM = 0x4E91A7
"""Sets these draws apart from everything else that the run's seed fixes."""


@dataclass(frozen=True, slots=True)
class ReplayEntry:
    """A group with the number of batches that it was part of."""

    group: Group
    times: int = 1

    @property
    def priority(self) -> float:
        """Standard deviation of its members' rewards."""
        return statistics.pstdev([trajectory.reward for trajectory in self.group.trajectories] or [0.0])


@dataclass(frozen=True, slots=True)
class ReplayedGroups:
    """Old groups that join a batch, and what each one's policy loss is multiplied with."""

    groups: tuple[Group, ...] = ()
    weights: tuple[float, ...] = ()


NO_REPLAY = ReplayedGroups()


class ReplayBuffer:
    """The groups that a learner keeps; oldest first."""

    def __init__(self, config: ReplayConfig, groups_per_step: int, seed: int) -> None:
        self._config = config
        self._groups_per_step = groups_per_step
        self._seed = seed
        self._kept: list[ReplayEntry] = []

    def __len__(self) -> int:
        return len(self._kept)

    def choose(self, step: int, max_staleness: float) -> ReplayedGroups:
        """Groups that join optimizer batch `step` (0-based); changes nothing."""
        due = self._due(step)
        fresh_enough = [kept for kept in self._kept if self._may_join(kept, step, max_staleness)]
        if not due or not fresh_enough:
            return NO_REPLAY
        count = min(due, len(fresh_enough))
        rng = np.random.default_rng([self._seed, STREAM, step])
        shares = self._shares(fresh_enough)
        match self._config.sampler:
            case "fifo":
                places = list(range(count))
            case "lifo":
                places = list(range(len(fresh_enough) - count, len(fresh_enough)))
            case _:
                places = sorted(rng.choice(len(fresh_enough), count, replace=False, p=shares).tolist())
        return ReplayedGroups(
            tuple(fresh_enough[i].group for i in places), self._weights(shares[places], len(fresh_enough))
        )

    def trained(self, fresh: Sequence[Group], again: ReplayedGroups) -> None:
        """A batch of `fresh` groups and of those that joined it is behind the weights."""
        if self._config.samples_per_insert is None:
            return
        joined = {group.number for group in again.groups}
        kept = [replace(each, times=each.times + (each.group.number in joined)) for each in self._kept]
        kept += [ReplayEntry(group) for group in fresh]
        self._kept = [each for each in kept if each.times < self._config.max_times_sampled][-self._config.max_size :]

    def save(self, folder: Path) -> None:
        """Write what is kept into a checkpoint's folder."""
        rows = [[each.times, pack_group(each.group)] for each in self._kept]
        (folder / FILE).parent.mkdir(exist_ok=True)
        (folder / FILE).write_bytes(cast(bytes, msgpack.packb(rows)))

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint's folder; one that was written without any holds none."""
        path = folder / FILE
        rows = cast(list[Any], msgpack.unpackb(path.read_bytes())) if path.is_file() else []
        self._kept = [ReplayEntry(unpack_group(body), times) for times, body in rows]

    def _due(self, step: int) -> int:
        """Old groups that this step's batch has room for, so that the mean over all steps is `samples_per_insert`."""
        if self._config.samples_per_insert is None:
            return 0
        rate = (self._config.samples_per_insert - 1) * self._groups_per_step
        return math.floor(rate * (step + 1)) - math.floor(rate * step)

    def _may_join(self, kept: ReplayEntry, step: int, max_staleness: float) -> bool:
        bound = max_staleness if self._config.max_staleness is None else self._config.max_staleness
        return step - kept.group.oldest_version < bound + 1  # a lag is a whole number of versions

    def _shares(self, kept: Sequence[ReplayEntry]) -> npt.NDArray[np.float64]:
        """[N]: probability of each in one draw."""
        if self._config.sampler != "prioritized":
            return np.full(len(kept), 1.0 / len(kept))
        raw = np.array([each.priority + 1e-6 for each in kept]) ** self._config.priority_exponent
        return raw / raw.sum()

    def _weights(self, shares: npt.NDArray[np.float64], size: int) -> tuple[float, ...]:
        if self._config.sampler != "prioritized":
            return (1.0,) * len(shares)
        weights = (1.0 / (size * shares)) ** self._config.importance_sampling_exponent
        return tuple((weights / weights.max()).tolist())
