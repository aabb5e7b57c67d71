"""Optimizer steps on one batch of groups.

Invariant: groups and their order determine the weights, for any number of ranks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat.services.messages.types import Group
from offbeat.services.telemetry import Partial
from offbeat.trainer.algorithms.aggregation import MaskedCounts
from offbeat.trainer.algorithms.kl import KLController
from offbeat.trainer.algorithms.normalization import RunningMoments
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.config.scored_roles import REFERENCE, TEACHER_PREFIX
from offbeat.trainer.data.batch import (
    Batch,
    MicroBatch,
    minibatches,
    pack,
)
from offbeat.trainer.data.seats import split_seats
from offbeat.trainer.data.selection import select_most_varied, trained_episodes
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.base import Hyperparameters, StepOutcome, TrainEngine
from offbeat.trainer.engines.frozen import FrozenModel, LogprobModel, Reference
from offbeat.trainer.engines.process_group import Ranks
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
from offbeat.trainer.training.critic_exchange import RemoteCritic
from offbeat.trainer.training.critic_steps import (
    CriticSteps,
    configured_rate,
    critic_rate,
    merge_over_ranks,
    outcome_gauges,
)
from offbeat.trainer.training.group_scorer import (
    GroupScorer,
    cut,
    decode_scores,
    inference_budget,
    scatter_outputs,
    to_input,
)
from offbeat.trainer.training.step_tokens import StepTokens, merge_seen

Gauges = dict[str, Partial]


@dataclass(frozen=True, slots=True)
class StepModels:
    policy: TrainEngine[Sampled]
    critic: TrainEngine[Tensor] | None = None
    """None: there is none, or it has processes of its own."""
    reference: LogprobModel | None = None
    teachers: Sequence[LogprobModel | None] = ()
    """In the order of `teacher`; None: scored by its service."""
    score_keys: Mapping[str, str] = field(default_factory=dict[str, str])
    """Role -> key in `Group.scores`, of roles scored by a service or in files."""
    vocab_size: int = 0


@dataclass(frozen=True, slots=True)
class StepPreview:
    groups: tuple[Group, ...]
    batch: Batch
    targets: Targets
    logprobs: Tensor
    """Policy's, of the sampled tokens, [M]."""


class InitialOutputs(NamedTuple):
    """Outputs before a step, [M] each; None if not needed."""

    logprobs: Tensor | None = None
    values: Tensor | None = None
    next_values: Tensor | None = None
    divergences: Tensor | None = None


class BatchTrainer:
    """Training on groups; collective."""

    def __init__(self, config: LearnerConfig, models: StepModels, ranks: Ranks) -> None:
        self._config = config
        self._args = config.actor_train.training_args
        self._models = models
        self._ranks = ranks
        self._critic = None if models.critic is None else CriticSteps(config, models.critic, ranks)
        self._remote_critic = RemoteCritic(ranks) if ranks.critics else None
        self.kl = KLController(config.init_kl_coef or 0.0, config.target_kl, config.kl_horizon)
        self._running = RunningMoments()
        self.learning_rate = self._args.learning_rate
        """Peak of the schedule."""
        self.last_step: StepTokens | None = None
        """Of rank 0, with `console.keep_steps`."""

    def train(self, batch: StepBatch) -> Gauges:
        """Train; without sampled tokens, weights stay."""
        self.last_step = None
        gauges = self._train(batch)
        every, reference = self._config.ref_model_sync_steps, self._models.reference
        if every is not None and isinstance(reference, FrozenModel) and (batch.step + 1) % every == 0:
            reference.follow(self._models.policy.tensors(), self._config.ref_model_mixup_alpha)
        return gauges

    def _train(self, step_batch: StepBatch) -> Gauges:
        selected, masked = self._select(step_batch)
        batch, step = pack(selected), step_batch.step
        self._update_running_moments(step_batch)
        if not batch.num_sampled:
            return {}
        micro_batches = self._cut_for_inference(batch)
        states = self._reference_states(batch, micro_batches)
        targets, values = self._targets(selected, batch, micro_batches, step, masked, states)
        targets = apply_group_weights(targets, batch, _group_weights(step_batch, selected))
        if self._remote_critic is not None:
            self._remote_critic.send(targets)
        parts = [self._cut(batch, part) for part in minibatches(batch, self._args.num_minibatches)]
        pieces: list[Gauges] = []
        seen = torch.full((batch.num_sampled,), math.nan) if self._config.console.keep_steps else None
        for epoch in range(self._config.ppo_epochs):
            for part in parts:
                pieces += self._optimize(part, targets, step, states, None if epoch else seen)
                targets = replace(targets, fresh=None)  # the weights are others now
        if seen is not None and (logprobs := merge_seen(seen, self._ranks)) is not None:
            self.last_step = StepTokens(step + 1, tuple(selected), batch, targets, logprobs, self._config)
        self.kl.update(targets.kl_in_reward, len(batch.episode_reward))
        trained = trained_episodes(batch, self._config)
        fixed = batch_gauges(batch, trained, targets.advantages, targets.returns, values, step, targets.critic_weights)
        if targets.teacher_kl is not None:
            fixed["actor/teacher_kl"] = Partial("mean", targets.teacher_kl * batch.num_sampled, batch.num_sampled)
        if self._config.add_token_level_kl:
            count = len(batch.episode_reward)
            fixed["actor/kl_in_reward"] = Partial("mean", targets.kl_in_reward * count, count)
        fixed["tokens/shared"] = shared_tokens(batch.num_tokens, parts)
        fixed["system/groups_left_out"] = Partial("sum", float(len(step_batch.groups) - len(selected)))
        return {**self._merge(pieces), **fixed, "actor/kl_coef": Partial("last", self.kl.coef)}

    def preview(self, step_batch: StepBatch) -> StepPreview | None:
        """Return the inputs of `train` under current weights; None without sampled tokens."""
        selected, masked = self._select(step_batch)
        batch = pack(selected)
        if not batch.num_sampled:
            return None
        before = self._running.state_dict()
        self._update_running_moments(step_batch)
        micro_batches = self._cut_for_inference(batch)
        states = self._reference_states(batch, micro_batches)
        targets, _ = self._targets(selected, batch, micro_batches, step_batch.step, masked, states)
        self._running.load_state_dict(before)
        logprobs = self._models.policy.infer([self._policy_input(micro) for micro in micro_batches])
        return StepPreview(tuple(selected), batch, targets, scatter_outputs(batch, micro_batches, logprobs))

    def state_dict(self) -> dict[str, Any]:
        """Return the state besides weights, optimizer and KL coefficient."""
        return {"running": self._running.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._running.load_state_dict(state["running"])

    def _select(self, step_batch: StepBatch) -> tuple[list[Group], MaskedCounts]:
        return select_most_varied(step_batch.shaped, self._config.variance_filter_ratio, step_batch.masked)

    def _update_running_moments(self, step_batch: StepBatch) -> None:
        for tag, rewards in sorted(step_batch.rewards_by_tag.items()):
            self._running.update(tag, torch.tensor(rewards, dtype=torch.float64))

    def _cut(self, batch: Batch, sequences: Sequence[int], max_tokens: int | None = None) -> list[MicroBatch]:
        budget = max_tokens or self._args.max_tokens_per_microbatch
        multiple_of = self._config.actor_train.num_pass_groups(self._ranks.world_size)
        return cut(self._config, batch, sequences, budget, multiple_of=multiple_of)

    def _cut_for_inference(self, batch: Batch) -> list[MicroBatch]:
        return self._cut(batch, range(batch.num_sequences), inference_budget(self._config))

    def _targets(
        self,
        groups: Sequence[Group],
        batch: Batch,
        micro_batches: Sequence[MicroBatch],
        step: int,
        masked: MaskedCounts,
        states: ReferenceStates | None,
    ) -> tuple[Targets, Tensor | None]:
        inputs = [self._policy_input(micro) for micro in micro_batches]

        def scatter(parts: Sequence[Tensor]) -> Tensor:
            return scatter_outputs(batch, micro_batches, parts)

        full = self._config.kl_in_reward_is_full
        policy_inputs = [self._policy_input(micro, states) for micro in micro_batches] if full else inputs
        initial = self._infer_initial(policy_inputs, scatter)
        ref_logprobs, teacher_logprobs = self._ref_logprobs(groups), self._teacher_logprobs(groups, batch)
        initial = self._add_values(initial, batch)
        targets = build_targets(
            batch,
            self._config,
            kl_coef=self.kl.coef,
            old_logprobs=initial.logprobs,
            old_is_present=self._trains_on_initial_pass,
            ref_logprobs=ref_logprobs,
            divergences=initial.divergences,
            teacher_logprobs=teacher_logprobs,
            values=initial.values,
            next_values=initial.next_values,
            version=step,
            num_minibatches=self._args.num_minibatches,
            running=self._running,
            masked=masked,
        )
        return targets, initial.values

    def _policy_input(
        self, micro: MicroBatch, states: ReferenceStates | None = None, *, head_alone: bool = False
    ) -> PackedInput:
        return to_input(micro, states, head_alone=head_alone, replays_routing=self._config.router_replay)

    @property
    def _trains_on_initial_pass(self) -> bool:
        """Return whether a batch's only optimizer step also computes the initial logprobs."""
        config, one_step = self._config, self._config.ppo_epochs == self._args.num_minibatches == 1
        no_other_use = not config.has_value_head and not needs_initial_logprobs(config)
        return config.old_logprobs == "recompute" and one_step and no_other_use

    def _infer_initial(
        self, inputs: Sequence[PackedInput], scatter: Callable[[Sequence[Tensor]], Tensor]
    ) -> InitialOutputs:
        policy = self._models.policy
        recompute = self._config.old_logprobs == "recompute" and not self._trains_on_initial_pass
        has_head, full = self._config.has_value_head, self._config.kl_in_reward_is_full
        bootstraps = self._config.bootstrap_truncated
        valued = [replace(x, with_next=True) for x in inputs] if bootstraps else inputs
        if not recompute and not has_head:
            return InitialOutputs()
        outputs = policy.infer(valued if has_head else inputs, all_of)
        return InitialOutputs(
            _row(outputs, 0, scatter) if recompute else None,
            _row(outputs, -2 if bootstraps else -1, scatter) if has_head else None,
            _row(outputs, -1, scatter) if has_head and bootstraps else None,
            _row(outputs, 1, scatter) if full else None,
        )

    def _add_values(self, initial: InitialOutputs, batch: Batch) -> InitialOutputs:
        """Add the critic's values; one with processes of its own has computed them meanwhile."""
        if self._remote_critic is not None:
            return initial._replace(**self._remote_critic.values()._asdict())
        if self._critic is not None:
            return initial._replace(**self._critic.values(batch)._asdict())
        return initial

    def _ref_logprobs(self, groups: Sequence[Group]) -> Tensor | None:
        if not self._config.needs_ref_logprobs:
            return None
        rows = self._score(self._models.reference, REFERENCE, self._config.reference.infer_batch_size, groups)
        return None if rows is None else torch.cat(rows)

    def _teacher_logprobs(self, groups: Sequence[Group], batch: Batch) -> Tensor | None:
        """Return logprobs, [K, M]; zeros for untaught groups."""
        if not self._models.teachers:
            return None
        rows: list[Tensor] = []
        masks = teacher_mask(self._config, batch)
        for model, (name, teacher), taught in zip(
            self._models.teachers, self._config.teacher.items(), masks, strict=True
        ):
            taught_groups = [group for group in groups if teacher.teaches(group.tag)]
            scores = self._score(model, f"{TEACHER_PREFIX}{name}", teacher.infer_batch_size, taught_groups) or []
            row = torch.zeros(batch.num_sampled)
            row[taught] = torch.cat(scores) if scores else row.new_zeros(0)
            rows.append(row)
        return torch.stack(rows)

    def _score(
        self, model: LogprobModel | None, role: str, infer_batch_size: int | None, groups: Sequence[Group]
    ) -> list[Tensor] | None:
        """Return logprobs per group, by the service or the model in this process, if any."""
        if key := self._models.score_keys.get(role):
            return [decode_scores(group, key) for group in groups]
        return None if model is None else GroupScorer(model, self._config, infer_batch_size).score(groups)

    def _reference_states(self, batch: Batch, micro_batches: Sequence[MicroBatch]) -> ReferenceStates | None:
        reference = self._models.reference
        if not isinstance(reference, Reference) or not self._config.full_kls:
            return None
        parts = reference.hidden_states([to_input(micro) for micro in micro_batches])
        hidden = parts[0].hidden.new_empty(batch.num_sampled, parts[0].hidden.shape[1], device="cpu")
        for micro, part in zip(micro_batches, parts, strict=True):
            hidden[micro.index] = part.hidden.cpu()
        return ReferenceStates(hidden, parts[0].head)

    def _optimize(
        self,
        micro_batches: Sequence[MicroBatch],
        targets: Targets,
        step: int,
        states: ReferenceStates | None,
        seen: Tensor | None,
    ) -> list[Gauges]:
        """Take one step of policy and critic; return this rank's gauges. seen: receives the policy's logprobs.

        The policy's is skipped without episodes in the loss, as Adam's moments would still move the weights.
        """
        warming = step < self._config.critic_warmup
        loss_states = states if self._config.kl_in_loss_is_full else None
        inputs = [self._policy_input(micro, loss_states, head_alone=warming) for micro in micro_batches]
        entropy_coef = scheduled_rate(
            step,
            peak=self._config.entropy_loss_coef,
            scheduler=self._config.entropy_loss_scheduler_type,
            warmup_steps=0,
            total_steps=self._config.max_steps,
        )
        losses = StepLosses(self._config, micro_batches, targets, entropy_coef, self._ranks.device, seen=seen)
        policy, decay, head_rate = self._models.policy, self._args.weight_decay, critic_rate(self._config, step)
        rate = configured_rate(self._config, step, self.learning_rate, self._args.warmup_steps)
        learns = self._config.has_value_head or any(bool(targets.weights[micro.index].any()) for micro in micro_batches)
        outcomes: list[Gauges] = []
        if self._critic is not None:
            outcomes += self._critic.optimize(micro_batches, targets, step)
        if warming and self._config.has_value_head:
            trained = policy.train(inputs, losses.of_head, Hyperparameters(0.0, decay, head_rate, head_alone=True))
            outcomes.append(self._outcome("critic", trained, head_rate))
        elif not warming and learns:
            trained = policy.train(inputs, losses.of_policy, Hyperparameters(rate, decay, head_rate))
            outcomes.append(self._outcome("actor", trained, rate))
            if self._config.has_value_head and self._ranks.rank == 0:
                outcomes.append({"critic/lr": Partial("last", head_rate)})
        return [*losses.gauges, *outcomes]

    def _outcome(self, model: str, outcome: StepOutcome, rate: float) -> Gauges:
        return {} if self._ranks.rank > 0 else outcome_gauges(model, outcome, rate)

    def _merge(self, pieces: Sequence[Gauges]) -> Gauges:
        merged = merge_over_ranks(self._ranks, pieces)
        of_critic = {} if self._remote_critic is None else self._remote_critic.gauges()
        return with_effective_sample_size({**merged, **of_critic})


def shared_tokens(num_tokens: int, parts: Sequence[Sequence[MicroBatch]]) -> Partial:
    """num_tokens: of the sequences in `parts`."""
    num_computed = sum(len(micro.tokens) for part in parts for micro in part)
    return Partial("sum", float(num_tokens - num_computed))


def _group_weights(step_batch: StepBatch, selected: Sequence[Group]) -> list[float]:
    """Return weights by `Batch.group`; a single 1 if all are 1."""
    if not step_batch.weights:
        return [1.0]
    weights = zip(step_batch.groups, step_batch.weights, strict=True)
    weight_by_number = {group.number: weight for group, weight in weights}
    return [weight_by_number[group.number] for group in split_seats(selected)]


def _row(outputs: Sequence[Tensor], row: int, scatter: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
    return scatter([rows[row] for rows in outputs])
