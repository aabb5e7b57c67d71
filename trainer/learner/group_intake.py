"""Takes a step's groups from the buffer and checks their staleness again.

Invariants: every group that is taken is trained, masked or dropped with a reason; decisions depend only on the groups
and their order, so a learner that repeats a step after a crash takes the same ones.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from offbeat.services.buffer.api import LearnerBuffer
from offbeat.services.messages.types import Group, Trajectory
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.data.selection import carries_signal

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Upper bound of the delay with which a stop is noticed while the buffer is empty."""
STALE, NO_SIGNAL, MALFORMED = "stale", "no_signal", "malformed"


@dataclass
class StepGroups:
    """Groups consumed by one step."""

    groups: list[Group] = field(default_factory=list[Group])
    """Count towards the step, in stream order."""
    signal: list[Group] = field(default_factory=list[Group])
    """Groups that are computed on."""
    masked: list[Group] = field(default_factory=list[Group])
    """The others."""
    unlearned: list[Group] = field(default_factory=list[Group])
    """Zero-signal groups that were replaced by fresh ones."""
    stale: int = 0
    """Trained though they exceed `max_staleness` (`stale_policy: train`)."""
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    """Groups that made room for others, by reason."""
    wait_s: float = 0.0

    @property
    def entry_ids(self) -> tuple[str, ...]:
        return tuple(group.entry_id for group in self.groups)


@dataclass(frozen=True, slots=True)
class GroupIntake:
    """Takes groups for one step after another."""

    buffer: LearnerBuffer
    config: AlgorithmConfig
    groups_per_step: int
    max_staleness: float
    train_stale: bool
    vocab_size: int

    def take(self, step: int, stopped: Callable[[], bool]) -> StepGroups | None:
        """Block until the groups of step `step` (0-based) are available; return None if `stopped` becomes true first."""
        taken = StepGroups()
        began = time.monotonic()
        while len(taken.groups) < self.groups_per_step:
            if stopped():
                return None
            group = self.buffer.take(POLL_S, self.groups_per_step - len(taken.groups))
            if group is not None:
                self._sort(group, step, taken)
        taken.wait_s = time.monotonic() - began
        return taken

    def _sort(self, group: Group, step: int, taken: StepGroups) -> None:
        complaint = _problem(group, self.vocab_size, self.config.num_baselines)
        if complaint:
            logger.error("group %d is dropped: %s", group.number, complaint)
            self._drop(group, MALFORMED, taken)
            return
        late = step - group.oldest_version >= self.max_staleness + 1  # a lag is a whole number of versions
        if late and not self.train_stale:
            self._drop(group, STALE, taken)
            return
        signal = carries_signal(group, self.config)
        if not signal and self.config.zero_variance == "refill":
            taken.unlearned.append(group)
            self._drop(group, NO_SIGNAL, taken)
            return
        taken.stale += late
        taken.groups.append(group)
        (taken.signal if signal else taken.masked).append(group)

    def _drop(self, group: Group, reason: str, taken: StepGroups) -> None:
        self.buffer.drop(group, reason)
        taken.dropped[reason] = taken.dropped.get(reason, 0) + 1


def _problem(group: Group, vocab_size: int, num_baselines: int) -> str:
    """Return why the step can't compute on the group, or an empty string."""
    if len(group.baselines) < num_baselines:
        return "nobody played its baseline, which is wanted since the run was resumed"
    return next((p for trajectory in group.trajectories if (p := _problem_of(trajectory, vocab_size))), "")


def _problem_of(trajectory: Trajectory, vocab_size: int) -> str:
    turns = [np.zeros(len(segment.tokens), dtype=np.bool_) for segment in trajectory.segments]
    for turn in trajectory.turns:
        turns[turn.segment][turn.start : turn.end] = True
    for segment, in_turn in zip(trajectory.segments, turns, strict=True):
        if not len(segment.tokens):
            return "an empty segment"
        if segment.loss_mask[0]:
            return "a segment starts with a sampled token"
        if (segment.loss_mask & ~in_turn).any():
            return "a sampled token is of no turn"
        if int(segment.tokens.max()) >= vocab_size:
            return f"token {int(segment.tokens.max())} of a vocabulary of {vocab_size}"
    return ""
