"""Optimizer steps of the data pipelines and of pairs from a policy's own groups, and validation losses.

Invariants: as `optimizer_step`; a minibatch and a micro-batch hold complete groups.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offbeat.services.messages.types import Group
from offbeat.services.telemetry import Partial, merge_all
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.data.batch import Batch, MicroBatch, group_minibatches, pack
from offbeat.trainer.data.pairs import best_and_worst
from offbeat.trainer.data.prefix_trees import whole_group_microbatches
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.base import Hyperparameters
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.policy import Sampled
from offbeat.trainer.training.critic_steps import configured_rate
from offbeat.trainer.training.data_objectives import (
    Objective,
    PreferenceObjective,
    SupervisedObjective,
    UnpairedObjective,
    distillation_of,
    reward_model_of,
)
from offbeat.trainer.training.group_scorer import inference_budget, scatter_outputs, to_input
from offbeat.trainer.training.optimizer_step import (
    BatchTrainer,
    Gauges,
    StepModels,
    StepPreview,
    shared_tokens,
)
from offbeat.trainer.training.teacher_scorer import TeacherScorer


class DataTrainer(BatchTrainer):
    """Training on dataset rows, or on pairs; collective."""

    def preview(self, step_batch: StepBatch) -> StepPreview | None:
        """Return None: there are neither ratios nor advantages."""
        del step_batch

    def evaluate(self, groups: Sequence[Group]) -> Gauges:
        """Return the losses over all groups, computed in parts of a step's size."""
        gauges: list[Gauges] = []
        finish: Callable[[Gauges], Gauges] = dict
        for start in range(0, len(groups), size := self._config.rollout_batch_size):
            objective = self._objective(groups[start : start + size], num_minibatches=1)
            if parts := self._evaluate(objective):
                gauges += parts
                finish = objective.finish
        return finish(merge_all(gauges))

    def _evaluate(self, objective: Objective) -> list[Gauges]:
        batch = objective.batch
        if not batch.num_sampled:
            return []
        micro_batches = self._cut_rows(objective, range(batch.num_sequences))
        losses = objective.make_losses(micro_batches)
        outputs = self._models.policy.infer([objective.to_input(micro) for micro in micro_batches], _loss_inputs)
        for i, rows in enumerate(outputs):
            losses.of_policy(i, rows[0] if self._config.trains_reward_model else Sampled(*rows))
        return losses.gauges  # every rank has every output

    def _train(self, step_batch: StepBatch) -> Gauges:
        groups, step = step_batch.groups, step_batch.step
        if self._config.pipeline == "online_dpo":
            groups = list(best_and_worst(step_batch.shaped))
        objective = self._objective(groups, num_minibatches=self._args.num_minibatches)
        batch = objective.batch
        if not batch.num_sampled:
            return {}
        rate = configured_rate(self._config, step, self.learning_rate, self._args.warmup_steps)
        pieces: list[Gauges] = []
        parts: list[list[MicroBatch]] = []
        trained: list[int] = []
        for sequences in group_minibatches(batch, self._args.num_minibatches):
            micro_batches = self._cut_rows(objective, sequences)
            trained += _trained(objective, sequences)
            losses = objective.make_losses(micro_batches)
            inputs = [objective.to_input(micro) for micro in micro_batches]
            outcome = self._models.policy.train(
                inputs, losses.of_policy, Hyperparameters(rate, self._args.weight_decay)
            )
            pieces += [*losses.gauges, self._outcome("actor", outcome, rate)]
            parts.append(micro_batches)
        learned = torch.isin(batch.sequence, torch.tensor(trained))
        lengths = _response_lengths(groups)[torch.unique(batch.trajectory[learned])]
        return {
            **objective.finish(self._merge(pieces)),
            "tokens_trained": Partial("sum", float(learned.sum())),
            "tokens/computed": Partial("sum", float(batch.num_tokens)),
            "tokens/shared": shared_tokens(int(batch.cu_seqlens.diff()[trained].sum()), parts),
            "tokens/response_length/mean": Partial("mean", float(lengths.sum()), float(len(lengths))),
            "tokens/response_length/min": Partial("min", float(lengths.min())),
            "tokens/response_length/max": Partial("max", float(lengths.max())),
        }

    def _objective(self, groups: Sequence[Group], *, num_minibatches: int) -> Objective:
        if self._config.pipeline == "distill":
            return distillation_of(self._config, groups, self._teacher_scorers(), self._models.score_keys)
        if self._config.trains_reward_model:
            return reward_model_of(groups, self._config.center_rewards_coefficient)
        batch = pack(groups)
        if self._config.pipeline == "sft":
            return SupervisedObjective(batch)
        reference = self._reference_logprobs(groups, batch, num_minibatches) if groups else None
        if self._config.dpo.loss_type != "kto":
            return PreferenceObjective(self._config, batch, reference)
        if reference is None:
            raise ValueError("kto needs a reference")
        return UnpairedObjective(self._config, batch, reference, lambda sequences: self._logprobs(batch, sequences))

    def _logprobs(self, batch: Batch, sequences: Sequence[int]) -> Tensor:
        micro_batches = self._cut(batch, sequences)
        return scatter_outputs(
            batch, micro_batches, self._models.policy.infer([to_input(micro) for micro in micro_batches])
        )

    def _teacher_scorers(self) -> dict[str, TeacherScorer]:
        models = zip(self._config.teacher.items(), self._models.teachers, strict=True)
        return {
            name: TeacherScorer(model, self._config, teacher.infer_batch_size, self._models.vocab_size)
            for (name, teacher), model in models
            if model is not None
        }

    def _reference_logprobs(self, groups: Sequence[Group], batch: Batch, num_minibatches: int) -> Tensor | None:
        """Score the policy's micro-batches, so that equal weights have equal logprobs, or those of
        `infer_batch_size`."""
        model, size = self._models.reference, self._config.reference.infer_batch_size
        if model is None or self._config.dpo.loss_type == "kto" or "reference" in self._models.score_keys:
            rows = self._score(model, "reference", size, groups)
            return torch.cat(rows) if rows else None
        budget = inference_budget(self._config, size)
        parts = group_minibatches(batch, num_minibatches)
        cuts = [micro for part in parts for micro in self._cut_whole(batch, part, budget)]
        return scatter_outputs(batch, cuts, model.infer([to_input(micro) for micro in cuts]))

    def _cut_rows(self, objective: Objective, sequences: Sequence[int]) -> list[MicroBatch]:
        if isinstance(objective, UnpairedObjective):
            return self._cut(objective.batch, _trained(objective, sequences))
        return self._cut_whole(objective.batch, sequences)

    def _cut_whole(self, batch: Batch, sequences: Sequence[int], budget: int | None = None) -> list[MicroBatch]:
        return whole_group_microbatches(
            batch,
            sequences,
            budget or self._args.max_tokens_per_microbatch,
            share_prefix=self._config.actor_train.model_args.shared_prefix,
            multiple_of=self._config.actor_train.num_pass_groups(self._ranks.world_size),
        )


def make_trainer(config: LearnerConfig, models: StepModels, ranks: Ranks) -> BatchTrainer:
    kind = BatchTrainer if config.pipeline in ("agentic", "rlvr") else DataTrainer
    return kind(config, models, ranks)


def _trained(objective: Objective, sequences: Sequence[int]) -> list[int]:
    return objective.trained(sequences) if isinstance(objective, UnpairedObjective) else list(sequences)


def _response_lengths(groups: Sequence[Group]) -> Tensor:
    """Count each trajectory's learned tokens, [T] float32."""
    trajectories = (trajectory for group in groups for trajectory in group.trajectories)
    return torch.tensor([float(sum(part.loss_mask.sum() for part in each.segments)) for each in trajectories])


def _loss_inputs(output: Sampled | Tensor) -> Tensor:
    if isinstance(output, Tensor):
        return output[None]
    outputs = (output.logprobs, output.entropies, output.divergences)
    return torch.stack([values for values in outputs if values is not None])
