"""Optimizer steps of the data pipelines, and their validation losses.

Invariants: as `optimizer_step`; a minibatch and a micro-batch hold complete groups.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.services.messages.types import Group
from offbeat.services.telemetry import Partial, merge_all
from offbeat.trainer.data.batch import Batch, MicroBatch, group_minibatches, pack
from offbeat.trainer.data.prefix_groups import whole_group_microbatches
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.base import Hyperparameters
from offbeat.trainer.losses.preference import PreferenceLosses
from offbeat.trainer.losses.supervised import SupervisedLosses
from offbeat.trainer.models.policy import Sampled
from offbeat.trainer.training.group_scorer import inference_budget, scatter_outputs, to_input
from offbeat.trainer.training.optimizer_step import (
    BatchTrainer,
    Gauges,
    StepPreview,
    shared_tokens,
)


class DataTrainer(BatchTrainer):
    """Training on dataset rows; collective."""

    def preview(self, step_batch: StepBatch) -> StepPreview | None:
        """Return None: rows have neither ratios nor advantages."""
        del step_batch

    def evaluate(self, groups: Sequence[Group]) -> Gauges:
        """Return the losses of groups under current weights."""
        batch = pack(groups)
        if not batch.num_sampled:
            return {}
        sequences = range(batch.num_sequences)
        micro_batches = self._cut_whole(batch, sequences)
        losses = self._losses(batch, micro_batches, self._reference_logprobs(batch, sequences, micro_batches))
        inputs = [to_input(micro) for micro in micro_batches]
        outputs = self._models.policy.infer(inputs, lambda output: torch.stack([output.logprobs, output.entropies]))
        for i, rows in enumerate(outputs):
            losses.of_policy(i, Sampled(rows[0], rows[1]))
        # Every rank has every output
        return merge_all(losses.gauges)

    def _train(self, step_batch: StepBatch) -> Gauges:
        batch, step = pack(step_batch.groups), step_batch.step
        if not batch.num_sampled:
            return {}
        rate = self._rate(step, self.learning_rate, self._args.warmup_steps)
        pieces: list[Gauges] = []
        parts: list[list[MicroBatch]] = []
        for sequences in group_minibatches(batch, self._args.num_minibatches):
            micro_batches = self._cut_whole(batch, sequences)
            losses = self._losses(batch, micro_batches, self._reference_logprobs(batch, sequences, micro_batches))
            inputs = [to_input(micro) for micro in micro_batches]
            outcome = self._models.policy.train(
                inputs, losses.of_policy, Hyperparameters(rate, self._args.weight_decay)
            )
            pieces += [*losses.gauges, self._outcome("actor", outcome, rate)]
            parts.append(micro_batches)
        lengths = batch.lengths.float()
        return {
            **self._merge(pieces),
            "tokens_trained": Partial("sum", float(batch.num_sampled)),
            "tokens/computed": Partial("sum", float(batch.num_tokens)),
            "tokens/shared": shared_tokens(batch, parts),
            "tokens/response_length/mean": Partial("mean", float(lengths.sum()), float(len(lengths))),
            "tokens/response_length/min": Partial("min", float(lengths.min())),
            "tokens/response_length/max": Partial("max", float(lengths.max())),
        }

    def _losses(
        self, batch: Batch, micro_batches: Sequence[MicroBatch], reference: Tensor | None
    ) -> SupervisedLosses | PreferenceLosses:
        index = torch.cat([micro.index for micro in micro_batches])
        if self._config.pipeline == "sft":
            return SupervisedLosses(len(index))
        trajectories = batch.trajectory[index]
        return PreferenceLosses(
            self._config.dpo,
            batch,
            micro_batches,
            num_pairs=len(torch.unique(batch.group[trajectories])),
            num_chosen_tokens=int((trajectories % 2 == 0).sum()),
            ref_logprobs=reference,
        )

    def _reference_logprobs(
        self, batch: Batch, sequences: Sequence[int], micro_batches: Sequence[MicroBatch]
    ) -> Tensor | None:
        """Score the policy's micro-batches, so that equal weights have equal logprobs; `infer_batch_size` cuts others."""
        model = self._models.reference
        if model is None:
            return None
        budget = inference_budget(self._config, self._config.reference.infer_batch_size)
        cuts = micro_batches if budget is None else self._cut_whole(batch, sequences, budget)
        return scatter_outputs(batch, cuts, model.infer([to_input(micro) for micro in cuts]))

    def _cut_whole(self, batch: Batch, sequences: Sequence[int], budget: int | None = None) -> list[MicroBatch]:
        return whole_group_microbatches(
            batch,
            sequences,
            budget or self._args.max_tokens_per_microbatch,
            share_prefix=self._config.actor_train.model_args.shared_prefix,
            multiple_of=self._ranks.world_size,
        )
