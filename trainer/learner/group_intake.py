"""Intake of a step's groups.

Invariants: every group is trained, masked, refilled or dropped with a reason; only the groups and their order decide, so a
repeated step meets again those that it refilled.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from offbeat.services.buffer.admission import oldest_consumable
from offbeat.services.buffer.api import LearnerBuffer
from offbeat.services.messages.types import Group, Trajectory
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.data.replay_buffer import ReplayedGroups
from offbeat.trainer.data.reward_shaping import shape_rewards
from offbeat.trainer.data.selection import carries_signal, masked_counts
from offbeat.trainer.data.step_batch import StepBatch, collect_rewards
from offbeat.trainer.learner.expired_groups import EXPIRED, ExpiredGroups
from offbeat.trainer.learner.file_scores import FileScores
from offbeat.trainer.learner.score_intake import ScoreIntake
from offbeat.trainer.learner.step_groups import StepGroups

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Maximum stop delay with an empty buffer."""
STALE, NO_SIGNAL, MALFORMED, UNPUBLISHED = "stale", "no_signal", "malformed", "unpublished_version"
TOO_LONG = "too_long"
"""Row without learned tokens within `sequence_length`, or longer; or a prompt of more than `prompt_length`."""


@dataclass(frozen=True, slots=True)
class GroupIntake:
    buffer: LearnerBuffer
    config: AlgorithmConfig
    groups_per_step: int
    train_stale: bool
    vocab_size: int
    scores: ScoreIntake | None = None
    """Of roles in services of their own."""
    files: FileScores | None = None
    """Of a dataset's rows."""
    reads_data: bool = False
    """All rows are trained; those without learned tokens are replaced."""
    drops_long: bool = False
    """Unanswerable prompts are replaced."""
    expired: ExpiredGroups | None = None
    """Counted as dropped, too."""

    def take(
        self, step: int, max_staleness: float, should_stop: Callable[[], bool], *, newest_version: int | None = None
    ) -> StepGroups | None:
        """Block until the groups of `step` (0-based) are available; return None if stopped.

        newest_version: of this run, by default `step`; higher while a successor repeats steps.
        """
        newest = step if newest_version is None else newest_version
        taken = StepGroups(newest_version=newest, are_rows=self.reads_data)
        if self.expired is not None:
            self.expired.begin()
        began = time.monotonic()
        while len(taken.groups) < self.groups_per_step:
            if should_stop():
                return None
            group = self.buffer.take(POLL_S, self.groups_per_step - len(taken.groups))
            if group is None:
                continue
            group = replace(group, temperature=None) if self.reads_data else group  # logits of rows are not scaled
            if reason := self._refuse(group, step, max_staleness, taken.newest_version):
                self._drop(group, reason, taken)
            elif not self._add(group, step, max_staleness, taken, should_stop):
                return None
        taken.wait_s = time.monotonic() - began
        if self.expired is not None and (num_expired := self.expired.count_new()):
            taken.dropped[EXPIRED] = num_expired
        return taken

    def can_train(self, group: Group) -> bool:
        """Return whether a kept group has what the current configuration needs: scores, baselines, ids of its vocabulary."""
        has_scores = self.scores is None or self.scores.has_scores(group)
        return has_scores and not _find_defect(group, self.vocab_size, self.config.num_baselines)

    def build_batch(self, step: int, taken: StepGroups, replayed: ReplayedGroups) -> StepBatch:
        return StepBatch(
            step,
            (*taken.trained, *replayed.groups),
            (*(taken.shaped[group.number] for group in taken.trained), *shape_rewards(replayed.groups, self.config)),
            masked_counts([taken.shaped[group.number] for group in taken.masked], self.config),
            (*(1.0 for _ in taken.trained), *replayed.weights),
            collect_rewards([*taken.shaped.values(), *shape_rewards(taken.refilled, self.config)]),
        )

    def _refuse(self, group: Group, step: int, max_staleness: float, newest_version: int) -> str | None:
        """Return why the step may not train a group."""
        if defect := _find_defect(group, self.vocab_size, self.config.num_baselines):
            logger.error("group %d dropped: %s", group.number, defect)
            return MALFORMED
        if group.newest_version > newest_version:
            newest = f"version {group.newest_version}, and the newest is {newest_version}"
            logger.error("group %d dropped: its tokens are of %s", group.number, newest)
            return UNPUBLISHED
        return STALE if _is_stale(group, step, max_staleness) and not self.train_stale else None

    def _add(
        self, group: Group, step: int, max_staleness: float, taken: StepGroups, should_stop: Callable[[], bool]
    ) -> bool:
        """Add a group, or drop it without signal or score; return False if stopped."""
        if self.reads_data:
            return self._add_row(group, step, taken, should_stop)
        if self.drops_long and not any(trajectory.turns for trajectory in group.trajectories):
            self._drop(group, TOO_LONG, taken)
            return True
        (shaped,) = shape_rewards([group], self.config)
        has_signal = carries_signal(group, self.config, shaped)
        if not has_signal and self.config.zero_variance == "refill":
            if len(taken.refilled) < round(self.config.max_refill_ratio * self.groups_per_step):
                self.buffer.refill(group, NO_SIGNAL, step + 1)
                taken.refilled.append(group)
                taken.dropped[NO_SIGNAL] = len(taken.refilled)
                return True
            if not taken.masked:
                logger.warning(
                    "step %d: %d groups without signal refilled (max_refill_ratio); further ones are masked",
                    step,
                    len(taken.refilled),
                )
        if has_signal and self.scores is not None:
            scored = self._attach_scores(self.scores, group, step, taken, should_stop)
            if not isinstance(scored, Group):
                return scored
            group, shaped = scored, replace(shaped, scores=scored.scores)
        taken.num_stale += _is_stale(group, step, max_staleness)
        taken.groups.append(group)
        taken.shaped[group.number] = shaped
        (taken.trained if has_signal else taken.masked).append(group)
        return True

    def _add_row(self, group: Group, step: int, taken: StepGroups, should_stop: Callable[[], bool]) -> bool:
        """Add or drop a row; return False if stopped."""
        if not all(trajectory.num_sampled for trajectory in group.trajectories):
            self._drop(group, TOO_LONG, taken)
            return True
        if self.scores is not None:
            scored = self._attach_scores(self.scores, group, step, taken, should_stop)
            if not isinstance(scored, Group):
                return scored
            group = scored
        if self.files is not None:
            group = self.files.attach(group)
        taken.groups.append(group)
        taken.trained.append(group)
        taken.shaped[group.number] = group
        return True

    def _attach_scores(
        self, scores: ScoreIntake, group: Group, step: int, taken: StepGroups, should_stop: Callable[[], bool]
    ) -> Group | bool:
        """Return the group with its scores; True if it was dropped, False if stopped."""
        began = time.monotonic()
        scored = scores.attach(group, step, should_stop)
        taken.score_wait_s += time.monotonic() - began
        if isinstance(scored, str):
            self._drop(group, scored, taken)
            return True
        return scored or False

    def _drop(self, group: Group, reason: str, taken: StepGroups) -> None:
        self.buffer.drop(group, reason)
        taken.dropped[reason] = taken.dropped.get(reason, 0) + 1


def _is_stale(group: Group, step: int, max_staleness: float) -> bool:
    return group.oldest_version < oldest_consumable(step, max_staleness)


def _find_defect(group: Group, vocab_size: int, num_baselines: int) -> str:
    if len(group.baselines) < num_baselines:
        return "its baseline rollout is missing (required since the run was resumed)"
    defects = (_find_trajectory_defect(trajectory, vocab_size) for trajectory in group.trajectories)
    return next(filter(None, defects), "")


def _find_trajectory_defect(trajectory: Trajectory, vocab_size: int) -> str:
    in_turns = [np.zeros(len(segment.tokens), dtype=np.bool_) for segment in trajectory.segments]
    for turn in trajectory.turns:
        in_turns[turn.segment][turn.start : turn.end] = True
    for segment, in_turn in zip(trajectory.segments, in_turns, strict=True):
        if not len(segment.tokens):
            return "it has an empty segment"
        if segment.loss_mask[0]:
            return "a segment starts with a sampled token"
        if (segment.loss_mask & ~in_turn).any():
            return "a sampled token belongs to no turn"
        if int(segment.tokens.max()) >= vocab_size:
            return f"token {int(segment.tokens.max())} is outside the vocabulary of {vocab_size}"
    return ""
