"""Values and optimizer steps of a critic that is a model of its own, in the learner's processes or in its own ones."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from offbeat.services.telemetry import MetricRecord, Partial, decode_record, encode_record, merge_all
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.data.batch import Batch, MicroBatch
from offbeat.trainer.engines.base import Hyperparameters, StepOutcome, TrainEngine
from offbeat.trainer.engines.process_group import Ranks, gather
from offbeat.trainer.engines.schedule import scheduled_rate
from offbeat.trainer.losses.policy_loss import critic_loss
from offbeat.trainer.losses.targets import Targets, ValueTargets
from offbeat.trainer.training.group_scorer import cut, inference_budget, scatter_outputs, to_input

Gauges = dict[str, Partial]


class CriticValues(NamedTuple):
    values: Tensor
    """Before each sampled token, [M]."""
    next_values: Tensor | None
    """After each token, [M], with `bootstrap_truncated`."""


class CriticSteps:
    """Critic on its ranks; collective."""

    def __init__(self, config: LearnerConfig, engine: TrainEngine[Tensor], ranks: Ranks) -> None:
        self._config = config
        self._engine = engine
        self._ranks = ranks

    def values(self, batch: Batch) -> CriticValues:
        budget = inference_budget(self._config, self._config.critic.infer_batch_size)
        sequences = range(batch.num_sequences)
        multiple_of = self._config.actor_train.num_pass_groups(self._ranks.world_size)
        micro_batches = cut(self._config, batch, sequences, budget, multiple_of=multiple_of)
        bootstraps = self._config.bootstrap_truncated
        outputs = self._engine.infer([replace(to_input(micro), with_next=bootstraps) for micro in micro_batches])
        if not bootstraps:
            return CriticValues(scatter_outputs(batch, micro_batches, outputs), None)
        rows = (scatter_outputs(batch, micro_batches, [rows[row] for rows in outputs]) for row in (0, 1))
        return CriticValues(*rows)

    def optimize(self, micro_batches: Sequence[MicroBatch], targets: Targets | ValueTargets, step: int) -> list[Gauges]:
        """Take one step; return this rank's gauges."""
        gauges: list[Gauges] = []

        def loss(i: int, values: Tensor) -> Tensor:
            of_micro = targets.at(micro_batches[i].index, self._ranks.device)
            total, found = critic_loss(self._config, values, of_micro)
            gauges.append(found)
            return total

        rate = critic_rate(self._config, step)
        hyperparameters = Hyperparameters(rate, self._config.actor_train.training_args.weight_decay)
        outcome = self._engine.train([to_input(micro) for micro in micro_batches], loss, hyperparameters)
        return [*gauges, *([outcome_gauges("critic", outcome, rate)] if self._ranks.rank == 0 else [])]


def critic_rate(config: LearnerConfig, step: int) -> float:
    """Return the learning rate of the critic or value head."""
    args = config.critic.training_args
    return configured_rate(config, step, args.learning_rate, args.warmup_steps)


def configured_rate(config: LearnerConfig, step: int, peak: float, warmup_steps: int) -> float:
    args = config.actor_train.training_args
    return scheduled_rate(
        step,
        peak=peak,
        scheduler=args.lr_scheduler_type,
        settings=args.lr_scheduler_kwargs,
        warmup_steps=warmup_steps,
        total_steps=config.max_steps,
    )


def merge_over_ranks(ranks: Ranks, pieces: Sequence[Gauges]) -> Gauges:
    """Return the merged gauges of a role's ranks; collective."""
    own = merge_all(pieces)
    if ranks.world_size == 1:
        return own
    blobs = gather(ranks, encode_record(MetricRecord("rank", own)))
    return merge_all(decode_record(blob).values for blob in blobs)


def outcome_gauges(model: str, outcome: StepOutcome, rate: float) -> Gauges:
    norm = {f"{model}/grad_norm": Partial("last", outcome.grad_norm)} if outcome.applied else {}
    skipped = {f"{model}/skipped_steps": Partial("sum", float(not outcome.applied))}
    scaled = {}
    if outcome.loss_scale is not None:
        scaled = {
            f"{model}/loss_scale": Partial("last", outcome.loss_scale),
            f"{model}/overflow_steps": Partial("sum", float(outcome.overflowed)),
        }
    return {f"{model}/lr": Partial("last", rate), **norm, **skipped, **scaled}
