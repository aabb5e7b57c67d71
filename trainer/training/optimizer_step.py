"""One optimizer batch: groups -> packed batch -> targets -> optimizer steps -> gauges.

Invariant: the same groups in the same order give the same weights, on any number of ranks; each rank runs the same calls on
the same groups and computes a share of the micro-batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from offbeat.services.messages.types import Group
from offbeat.services.telemetry import (
    MetricRecord,
    Partial,
    decode_record,
    encode_record,
    merge_all,
)
from offbeat.trainer.algorithms.aggregation import NO_MASKED, MaskedCounts
from offbeat.trainer.algorithms.kl import KLController
from offbeat.trainer.algorithms.normalization import RunningMoments
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.data.batch import (
    Batch,
    MicroBatch,
    microbatches,
    minibatches,
    pack,
)
from offbeat.trainer.data.prefix_groups import shared_microbatches
from offbeat.trainer.data.reward_shaping import shape_rewards
from offbeat.trainer.data.selection import most_varied
from offbeat.trainer.engines.base import Hyperparameters, StepOutcome, TrainEngine
from offbeat.trainer.engines.frozen import FrozenModel, LogprobModel, Reference
from offbeat.trainer.engines.process_group import Ranks, gather
from offbeat.trainer.engines.schedule import scheduled_rate
from offbeat.trainer.losses.metrics import batch_gauges, with_effective_sample_size
from offbeat.trainer.losses.policy_loss import StepLosses, all_of
from offbeat.trainer.losses.targets import (
    Targets,
    apply_group_weights,
    build_targets,
    needs_initial_logprobs,
    teacher_mask,
)
from offbeat.trainer.models.divergence import ReferenceStates
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.policy import Sampled

Gauges = dict[str, Partial]


@dataclass(frozen=True, slots=True)
class StepModels:
    """The engines of a run; `critic` and `reference` where its algorithm has one."""

    policy: TrainEngine[Sampled]
    critic: TrainEngine[Tensor] | None = None
    reference: LogprobModel | None = None
    teachers: Sequence[LogprobModel] = ()
    """Teachers in the order of the configuration's `teacher`."""


@dataclass(frozen=True, slots=True)
class StepPreview:
    """A step before its first optimizer step."""

    groups: tuple[Group, ...]
    batch: Batch
    targets: Targets
    logprobs: Tensor
    """[M]: the policy's logprobs of the sampled tokens."""


class BatchTrainer:
    """Trains a run's models on groups; all ranks make the same calls."""

    def __init__(self, config: LearnerConfig, models: StepModels, ranks: Ranks) -> None:
        self._config = config
        self._args = config.actor_train.training_args
        self._models = models
        self._ranks = ranks
        self.kl = KLController(config.init_kl_coef, config.target_kl, config.kl_horizon)
        self._running = RunningMoments()
        self.learning_rate = self._args.learning_rate
        """Peak of the policy's schedule."""

    def train(
        self, groups: Sequence[Group], step: int, silent: MaskedCounts = NO_MASKED, weights: Sequence[float] = ()
    ) -> Gauges:
        """Train optimizer batch `step` (0-based); groups without a sampled token leave the weights alone.

        silent: what else the batch is of, though it has nothing to say (`selection.silent_part`); weights: what each
        group's policy loss is multiplied with, 1 for all by default.
        """
        gauges = self._train(groups, step, silent, weights)
        every, reference = self._config.ref_model_sync_steps, self._models.reference
        if every is not None and isinstance(reference, FrozenModel) and (step + 1) % every == 0:
            reference.follow(self._models.policy.tensors(), self._config.ref_model_mixup_alpha)
        return gauges

    def _train(self, groups: Sequence[Group], step: int, silent: MaskedCounts, weights: Sequence[float]) -> Gauges:
        weight_of = dict(zip((group.number for group in groups), weights, strict=True)) if weights else {}
        chosen, silent = self._chosen(groups, silent)
        batch = pack(chosen)
        if not batch.num_sampled:
            return {}
        for number, tag in enumerate(batch.tags):
            self._running.update(tag, batch.episode_reward[batch.tag == number])
        anchor = self._anchor(batch)
        targets, values = self._targets(batch, step, silent, anchor)
        targets = apply_group_weights(targets, batch, [weight_of.get(group.number, 1.0) for group in chosen])
        pieces: list[Gauges] = []
        for _ in range(self._config.ppo_epochs):
            for part in minibatches(batch, self._args.num_minibatches):
                pieces += self._optimize(self._micro_batches(batch, part), targets, step, anchor)
        self.kl.update(targets.kl_in_reward, len(batch.episode_reward))
        fixed = batch_gauges(batch, targets.advantages, targets.returns, values, step)
        if targets.teacher_kl is not None:
            fixed["actor/teacher_kl"] = Partial("mean", targets.teacher_kl * batch.num_sampled, batch.num_sampled)
        if self._config.add_token_level_kl:
            count = len(batch.episode_reward)
            fixed["actor/kl_in_reward"] = Partial("mean", targets.kl_in_reward * count, count)
        fixed["tokens/shared"] = Partial("sum", float(self._num_shared(batch)))
        fixed["system/groups_left_out"] = Partial("sum", float(len(groups) - len(chosen)))
        return {**self._merge(pieces), **fixed, "actor/kl_coef": Partial("last", self.kl.coef)}

    def preview(self, groups: Sequence[Group], step: int, silent: MaskedCounts = NO_MASKED) -> "StepPreview | None":
        """Return the inputs that `train` would use under the current weights, or None without a sampled token; changes
        nothing."""
        chosen, silent = self._chosen(groups, silent)
        batch = pack(chosen)
        if not batch.num_sampled:
            return None
        before = self._running.state_dict()
        for number, tag in enumerate(batch.tags):
            self._running.update(tag, batch.episode_reward[batch.tag == number])
        targets, _ = self._targets(batch, step, silent, self._anchor(batch))
        self._running.load_state_dict(before)
        micro = self._micro_batches(batch, range(batch.num_sequences))
        logprobs = torch.zeros(batch.num_sampled)
        for each, part in zip(micro, self._models.policy.infer([_input(each) for each in micro]), strict=True):
            logprobs[each.index] = part.detach().to("cpu", torch.float32)
        return StepPreview(tuple(chosen), batch, targets, logprobs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a checkpoint besides weights, optimizer and KL coefficient, as plain values."""
        return {"running": self._running.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a checkpoint."""
        self._running.load_state_dict(state["running"])

    def _chosen(self, groups: Sequence[Group], silent: MaskedCounts) -> tuple[list[Group], MaskedCounts]:
        """Select the groups to train on, shape their rewards, and count the masked ones."""
        return most_varied(shape_rewards(groups, self._config), self._config.variance_filter_ratio, silent)

    def _micro_batches(self, batch: Batch, part: Sequence[int]) -> list[MicroBatch]:
        cut = shared_microbatches if self._config.actor_train.model_args.shared_prefix else microbatches
        return cut(batch, part, self._args.max_tokens_per_microbatch, multiple_of=self._ranks.world_size)

    def _num_shared(self, batch: Batch) -> int:
        """Tokens that one pass over the batch need not compute, because a sibling's are the same."""
        if not self._config.actor_train.model_args.shared_prefix:
            return 0
        parts = minibatches(batch, self._args.num_minibatches)
        return batch.num_tokens - sum(len(micro.tokens) for part in parts for micro in self._micro_batches(batch, part))

    def _targets(
        self, batch: Batch, step: int, silent: MaskedCounts, anchor: ReferenceStates | None
    ) -> tuple[Targets, Tensor | None]:
        """Return the targets of the batch and the critic's values."""
        micro = self._micro_batches(batch, range(batch.num_sequences))
        inputs = [_input(each) for each in micro]

        def whole(parts: Sequence[Tensor]) -> Tensor:
            out = torch.zeros(batch.num_sampled)
            for each, part in zip(micro, parts, strict=True):
                out[each.index] = part.detach().to("cpu", torch.float32)
            return out

        reference = self._models.reference
        held_against = [_input(each, anchor) for each in micro] if self._config.kl_in_reward_is_full else inputs
        old_logprobs, values, divergences = self._said(held_against, whole)
        targets = build_targets(
            batch,
            self._config,
            kl_coef=self.kl.coef,
            old_logprobs=old_logprobs,
            old_is_present=self._passes_from_the_start,
            ref_logprobs=whole(reference.infer(inputs)) if reference and self._config.needs_ref_logprobs else None,
            divergences=divergences,
            teacher_logprobs=self._teacher_logprobs(batch),
            values=values,
            version=step,
            num_minibatches=self._args.num_minibatches,
            running=self._running,
            silent=silent,
        )
        return targets, values

    @property
    def _passes_from_the_start(self) -> bool:
        """True if `recompute` is free: with one optimizer step per batch, its own forward pass gives the initial
        logprobs."""
        config, one_step = self._config, self._config.ppo_epochs == self._args.num_minibatches == 1
        alone = not config.has_value_head and not needs_initial_logprobs(config)
        return config.old_logprobs == "recompute" and one_step and alone

    def _said(
        self, inputs: Sequence[PackedInput], whole: Callable[[Sequence[Tensor]], Tensor]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the policy's initial logprobs, the critic's values, and the KL to the reference, each if needed; from
        one forward pass where all are the policy's."""
        policy, critic = self._models.policy, self._models.critic
        recompute = self._config.old_logprobs == "recompute" and not self._passes_from_the_start
        has_head, full = self._config.has_value_head, self._config.kl_in_reward_is_full
        values = whole(critic.infer(inputs)) if critic else None
        if not recompute and not has_head:
            return None, values, None
        said = policy.infer(inputs, all_of)
        return (
            whole([each[0] for each in said]) if recompute else None,
            whole([each[-1] for each in said]) if has_head else values,
            whole([each[1] for each in said]) if full else None,
        )

    def _teacher_logprobs(self, batch: Batch) -> Tensor | None:
        """[K, M]: logprobs of each teacher on the sequences that it teaches; zeros elsewhere."""
        if not self._models.teachers:
            return None
        out = torch.zeros(len(self._models.teachers), batch.num_sampled)
        for row, teacher, its in zip(out, self._models.teachers, teacher_mask(self._config, batch), strict=True):
            micro = self._micro_batches(batch, torch.unique(batch.sequence[its]).tolist())
            for each, part in zip(micro, teacher.infer([_input(each) for each in micro]), strict=True):
                row[each.index] = part.to("cpu", torch.float32)
        return out

    def _anchor(self, batch: Batch) -> ReferenceStates | None:
        """Return the reference's hidden states of the whole batch on the CPU, if the KL over the vocabulary is needed."""
        reference = self._models.reference
        if not isinstance(reference, Reference) or not self._config.full_kls:
            return None
        micro = self._micro_batches(batch, range(batch.num_sequences))
        parts = reference.anchors([_input(each) for each in micro])
        hidden = parts[0].hidden.new_empty(batch.num_sampled, parts[0].hidden.shape[1], device="cpu")
        for each, part in zip(micro, parts, strict=True):
            hidden[each.index] = part.hidden.cpu()
        return ReferenceStates(hidden, parts[0].head)

    def _optimize(
        self, micro: Sequence[MicroBatch], targets: Targets, step: int, anchor: ReferenceStates | None
    ) -> list[Gauges]:
        """One optimizer step of policy and critic; the gauges of this rank's passes. Where every episode is left out of the
        loss the policy takes none: of no gradient, Adam would make one of those before."""
        warming = step < self._config.critic_warmup
        held = anchor if self._config.kl_in_loss_is_full else None
        inputs = [_input(each, held, head_alone=warming) for each in micro]
        entropy_coef = scheduled_rate(
            step,
            peak=self._config.entropy_loss_coef,
            scheduler=self._config.entropy_loss_scheduler_type,
            warmup_steps=0,
            total_steps=self._config.max_steps,
        )
        losses = StepLosses(self._config, micro, targets, entropy_coef, self._ranks.device)
        policy, critic, decay = self._models.policy, self._models.critic, self._args.weight_decay
        rate = self._rate(step, self.learning_rate, self._args.warmup_steps)
        of_values = self._rate(step, self._config.critic.learning_rate, self._config.critic.warmup_steps)
        learns = self._config.has_value_head or any(bool(targets.weights[each.index].any()) for each in micro)
        outcomes: list[Gauges] = []
        if critic is not None:
            trained = critic.train(inputs, losses.of_critic, Hyperparameters(of_values, decay))
            outcomes.append(self._outcome("critic", trained, of_values))
        if warming and self._config.has_value_head:
            trained = policy.train(inputs, losses.of_head, Hyperparameters(0.0, decay, of_values, head_alone=True))
            outcomes.append(self._outcome("critic", trained, of_values))
        elif not warming and learns:
            trained = policy.train(inputs, losses.of_policy, Hyperparameters(rate, decay, of_values))
            outcomes.append(self._outcome("actor", trained, rate))
            if self._config.has_value_head and self._ranks.rank == 0:
                outcomes.append({"critic/lr": Partial("last", of_values)})
        return [*losses.gauges, *outcomes]

    def _outcome(self, who: str, outcome: StepOutcome, rate: float) -> Gauges:
        """Return the metrics that are equal on all ranks, from one of them."""
        if self._ranks.rank > 0:
            return {}
        norm = {f"{who}/grad_norm": Partial("last", outcome.grad_norm)} if outcome.applied else {}
        skipped = {f"{who}/skipped_steps": Partial("sum", float(not outcome.applied))}
        return {f"{who}/lr": Partial("last", rate), **norm, **skipped}

    def _rate(self, step: int, peak: float, warmup_steps: int) -> float:
        return scheduled_rate(
            step,
            peak=peak,
            scheduler=self._args.lr_scheduler_type,
            settings=self._args.lr_scheduler_kwargs,
            warmup_steps=warmup_steps,
            total_steps=self._config.max_steps,
        )

    def _merge(self, pieces: Sequence[Gauges]) -> Gauges:
        """Over micro-batches and ranks."""
        mine = merge_all(pieces)
        if self._ranks.world_size == 1:
            return with_effective_sample_size(mine)
        blobs = gather(self._ranks, encode_record(MetricRecord("rank", mine)))
        return with_effective_sample_size(merge_all(decode_record(blob).values for blob in blobs))


def _input(micro: MicroBatch, anchor: ReferenceStates | None = None, *, head_alone: bool = False) -> PackedInput:
    x = PackedInput.of(
        micro.tokens, micro.cu_seqlens, micro.positions, micro.temperatures, micro.pictures, micro.parents
    )
    said = None if anchor is None else ReferenceStates(anchor.hidden[micro.index], anchor.head)
    return replace(x, anchor=said, head_alone=head_alone)
