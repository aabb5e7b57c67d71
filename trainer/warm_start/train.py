"""Supervised fine-tuning on demonstrations.

Invariant: equal seeds give equal weights.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np

from offbeat.services.errors import ControlError
from offbeat.services.telemetry import Partial, merge_all
from offbeat.trainer.config.actor_train import TrainingArgs
from offbeat.trainer.config.warm_start import WarmStartConfig
from offbeat.trainer.data.batch import balanced_bins
from offbeat.trainer.engines.base import Hyperparameters, TrainEngine
from offbeat.trainer.engines.schedule import plateau_rate
from offbeat.trainer.losses.supervised import SupervisedLosses
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.policy import Sampled
from offbeat.trainer.warm_start.demonstrations import Demonstrate, Demonstration, pack_demonstrations

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""(steps done, total steps) -> None."""

DEMO_SEED_STREAM = 0xDE30
"""Distinct from other uses of the seed."""


def warm_start(
    engine: TrainEngine[Sampled],
    config: WarmStartConfig,
    demonstrate: Demonstrate,
    *,
    seed: int,
    limits: TrainingArgs,
    progress: Progress,
    should_stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Train the policy, then reset the optimizer; collective.

    limits: for `max_tokens_per_microbatch` and `max_skipped_steps`.
    progress: every ten steps and after the last.

    Returns:
        The last step's loss in nats per token; None if stopped.

    Raises:
        ControlError: the gradient was not finite in `max_skipped_steps` consecutive steps.
    """
    rng = np.random.default_rng([seed, DEMO_SEED_STREAM])
    loss, num_skipped = 0.0, 0
    for step in range(config.steps):
        if should_stop():
            return None
        demos = [demo for _ in range(config.episodes_per_step) for demo in demonstrate(rng)]
        batch = _cut(demos, limits.max_tokens_per_microbatch, engine.data_size)
        losses = SupervisedLosses(sum(len(x.positions) for x in batch))
        outcome = engine.train(batch, losses.of_policy, _hyperparameters(config, step))
        loss = merge_all(losses.gauges).get("loss", Partial("mean", 0.0)).value  # 0: none of this rank's
        num_skipped = 0 if outcome.applied or outcome.overflowed else num_skipped + 1
        if num_skipped >= limits.max_skipped_steps:
            raise ControlError(
                f"warm start: the gradient was not finite in {num_skipped} consecutive steps, up to step {step + 1} (loss "
                f"{loss:.3g}): lower warm_start.learning_rate ({config.learning_rate:g})"
            )
        if step % 10 == 9 or step + 1 == config.steps:
            progress(step + 1, config.steps)
    engine.reset_optimizer()
    logger.info("warm start: %d steps, last loss %.3f nats per token", config.steps, loss)
    return loss


def _cut(demos: Sequence[Demonstration], max_tokens: int, data_size: int) -> list[PackedInput]:
    """Pack demonstrations into micro-batches, their number a multiple of `data_size` if there are enough."""
    bins = balanced_bins([len(demo.tokens) for demo in demos], max_tokens, data_size)
    return [pack_demonstrations([demos[i] for i in sorted(members)]) for members in bins]


def _hyperparameters(config: WarmStartConfig, step: int) -> Hyperparameters:
    rate = plateau_rate(
        step,
        peak=config.learning_rate,
        warmup_steps=config.warmup_steps,
        total_steps=config.steps,
        final_ratio=config.final_lr_ratio,
    )
    return Hyperparameters(rate, config.weight_decay)
