"""Losses of the data pipelines for one optimizer step's batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from offbeat.services.messages.types import Group
from offbeat.services.rollout.data.sampled import SAMPLED
from offbeat.services.rollout.data.source import MARGIN
from offbeat.services.telemetry import Partial
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.config.scored_roles import TEACHER_PREFIX
from offbeat.trainer.data.batch import Batch, MicroBatch, pack
from offbeat.trainer.data.whole_sequences import learned_tokens, with_prompts
from offbeat.trainer.losses.distillation import DistillationLosses, add_loss, make_distillation
from offbeat.trainer.losses.preference import PreferenceLosses
from offbeat.trainer.losses.reward_model import RewardModelLosses
from offbeat.trainer.losses.supervised import SupervisedLosses
from offbeat.trainer.losses.unpaired import UnpairedLosses, add_margins
from offbeat.trainer.models.distillation import TeacherTokens
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.training.group_scorer import to_input
from offbeat.trainer.training.teacher_scorer import TeacherScorer, decode_teacher

Gauges = dict[str, Partial]


class DataLosses(Protocol):
    gauges: list[Gauges]

    def of_policy(self, i: int, output: Any, /) -> Tensor: ...


class Objective(Protocol):
    """Loss of a batch."""

    @property
    def batch(self) -> Batch: ...

    def to_input(self, micro: MicroBatch) -> PackedInput: ...

    def make_losses(self, micro_batches: Sequence[MicroBatch]) -> DataLosses: ...

    def finish(self, gauges: Gauges) -> Gauges:
        """Return merged gauges with derived ones."""
        ...


@dataclass(frozen=True, slots=True)
class SupervisedObjective:
    batch: Batch

    def to_input(self, micro: MicroBatch) -> PackedInput:
        return to_input(micro)

    def make_losses(self, micro_batches: Sequence[MicroBatch]) -> DataLosses:
        return SupervisedLosses(sum(len(micro.index) for micro in micro_batches))

    def finish(self, gauges: Gauges) -> Gauges:
        return gauges


@dataclass(frozen=True, slots=True)
class RewardModelObjective:
    """margins: [T], of each trajectory's pair."""

    batch: Batch
    margins: Tensor
    center_coef: float

    def to_input(self, micro: MicroBatch) -> PackedInput:
        return to_input(micro)

    def make_losses(self, micro_batches: Sequence[MicroBatch]) -> DataLosses:
        num_pairs = sum(len(micro.index) for micro in micro_batches) // 2
        return RewardModelLosses(self.batch, micro_batches, self.margins, self.center_coef, num_pairs)

    def finish(self, gauges: Gauges) -> Gauges:
        return gauges


def reward_model_of(groups: Sequence[Group], center_coef: float) -> RewardModelObjective:
    margins = [trajectory.metrics.get(MARGIN, 0.0) for group in groups for trajectory in group.trajectories]
    return RewardModelObjective(pack(groups), torch.tensor(margins), center_coef)


@dataclass(frozen=True, slots=True)
class PreferenceObjective:
    config: LearnerConfig
    batch: Batch
    ref_logprobs: Tensor | None

    def to_input(self, micro: MicroBatch) -> PackedInput:
        return to_input(micro)

    def make_losses(self, micro_batches: Sequence[MicroBatch]) -> DataLosses:
        trajectories = self.batch.trajectory[torch.cat([micro.index for micro in micro_batches])]
        return PreferenceLosses(
            self.config.dpo,
            self.batch,
            micro_batches,
            num_pairs=len(torch.unique(self.batch.group[trajectories])),
            num_chosen_tokens=int((trajectories % 2 == 0).sum()),
            ref_logprobs=self.ref_logprobs,
        )

    def finish(self, gauges: Gauges) -> Gauges:
        return gauges


@dataclass(frozen=True, slots=True)
class UnpairedObjective:
    """Even trajectories are trained; odd ones have mismatched responses, to estimate the KL.

    infer_logprobs: sequences -> the policy's logprobs, [M], zeros elsewhere; collective.
    """

    config: LearnerConfig
    batch: Batch
    ref_logprobs: Tensor
    infer_logprobs: Callable[[Sequence[int]], Tensor]

    def to_input(self, micro: MicroBatch) -> PackedInput:
        return to_input(micro)

    def trained(self, sequences: Sequence[int]) -> list[int]:
        return [s for s in sequences if int(self._owners[s]) % 2 == 0]

    def make_losses(self, micro_batches: Sequence[MicroBatch]) -> DataLosses:
        rows = torch.unique(self.batch.trajectory[torch.cat([micro.index for micro in micro_batches])])
        kl = self._estimate_kl(rows + 1)
        return UnpairedLosses(self.config.dpo, self.batch, micro_batches, kl, len(rows), self.ref_logprobs)

    def finish(self, gauges: Gauges) -> Gauges:
        return add_margins(gauges)

    @property
    def _owners(self) -> Tensor:
        """Return each sequence's trajectory, [S]."""
        owners = torch.zeros(self.batch.num_sequences, dtype=torch.int64)
        owners[self.batch.sequence] = self.batch.trajectory
        return owners

    def _estimate_kl(self, mismatched: Tensor) -> float:
        """Return the mean log-ratio of mismatched responses, at least 0."""
        sequences = torch.isin(self._owners, mismatched).nonzero()[:, 0].tolist()
        chosen = torch.isin(self.batch.trajectory, mismatched)
        ratios = self.infer_logprobs(sequences)[chosen].double() - self.ref_logprobs[chosen].double()
        return max(0.0, float(ratios.sum()) / max(len(mismatched), 1))


@dataclass(frozen=True, slots=True)
class DistillationObjective:
    """learned: [M] bool, tokens with a likelihood term."""

    config: LearnerConfig
    batch: Batch
    teachers: Sequence[TeacherTokens]
    learned: Tensor

    @property
    def taught(self) -> Tensor:
        """Mask the tokens with a teacher, [M] bool."""
        weights = [teacher.weights for teacher in self.teachers]
        return torch.stack(weights).any(0) if weights else torch.zeros_like(self.learned)

    def to_input(self, micro: MicroBatch) -> PackedInput:
        teachers = [teacher.at(micro.index) for teacher in self.teachers]
        return replace(to_input(micro), distillation=make_distillation(self.config.distill, teachers))

    def make_losses(self, micro_batches: Sequence[MicroBatch]) -> DataLosses:
        index, taught = torch.cat([micro.index for micro in micro_batches]), self.taught
        return DistillationLosses(
            self.config.distill.distill_loss_weight,
            micro_batches,
            self.learned,
            taught,
            num_learned=int(self.learned[index].sum()),
            num_taught=int(taught[index].sum()),
        )

    def finish(self, gauges: Gauges) -> Gauges:
        return add_loss(self.config.distill.distill_loss_weight, gauges)


def distillation_of(
    config: LearnerConfig,
    groups: Sequence[Group],
    scorers: Mapping[str, TeacherScorer],
    score_keys: Mapping[str, str],
) -> DistillationObjective:
    """Build the objective. scorers: of teachers in this process, by name; score_keys: of others, by role."""
    sequences = with_prompts(groups) if config.distill.distill_on_prompt else list(groups)
    batch = pack(sequences)
    learned = torch.ones(batch.num_sampled, dtype=torch.bool)
    are_given = [not trajectory.metrics.get(SAMPLED) for group in groups for trajectory in group.trajectories]
    if not batch.num_sampled:
        return DistillationObjective(config, batch, (), learned)
    if config.distill.distill_on_prompt:
        learned = learned_tokens(groups)
    learned &= torch.tensor(are_given)[batch.trajectory]
    counts = torch.bincount(batch.group[batch.trajectory], minlength=len(groups)).tolist()
    teachers: list[TeacherTokens] = []
    for name, teacher in config.teacher.items():
        taught = [i for i, group in enumerate(groups) if teacher.teaches(group.tag)]
        scored = [groups[i] for i in taught]
        key = score_keys.get(f"{TEACHER_PREFIX}{name}", "")
        if name in scorers:
            blobs = scorers[name].encode(scored)
            scored = [replace(g, scores={key: blob.blob}) for g, blob in zip(scored, blobs, strict=True)]
        parts = [decode_teacher(group, key, counts[i]) for i, group in zip(taught, scored, strict=True)]
        if parts:
            teachers.append(_join(batch, taught, parts, teacher.opd_kl_coef))
    return DistillationObjective(config, batch, teachers, learned)


def _join(
    batch: Batch, taught: Sequence[int], parts: Sequence[tuple[Tensor | None, Tensor]], weight: float
) -> TeacherTokens:
    group_of = batch.group[batch.trajectory].contiguous()
    starts = torch.searchsorted(group_of, torch.tensor(taught)).tolist()
    width = max(logprobs.shape[1] for _, logprobs in parts)
    logprobs = torch.zeros(batch.num_sampled, width)
    ids = None if parts[0][0] is None else torch.zeros(batch.num_sampled, width - 1, dtype=torch.int64)
    weights = torch.zeros(batch.num_sampled)
    for start, (own_ids, own_logprobs) in zip(starts, parts, strict=True):
        rows = slice(start, start + len(own_logprobs))
        logprobs[rows], weights[rows] = own_logprobs, weight
        if ids is not None and own_ids is not None:
            ids[rows] = own_ids
    return TeacherTokens(ids, logprobs, weights)
