"""Supervised fine-tuning on demonstrations.

Invariant: equal seeds give equal weights.
"""

import logging
from collections.abc import Callable

import numpy as np

from offbeat.services.telemetry import Partial, merge_all
from offbeat.trainer.config.warm_start import WarmStartConfig
from offbeat.trainer.engines.base import Hyperparameters, TrainEngine
from offbeat.trainer.engines.schedule import plateau_rate
from offbeat.trainer.losses.supervised import SupervisedLosses
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.policy import Sampled
from offbeat.trainer.warm_start.demonstrations import Demonstrate, pack_demonstrations

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
    progress: Progress,
    should_stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Train the policy, then reset the optimizer; collective.

    progress: every ten steps and after the last.

    Returns:
        The last step's loss in nats per token; None if stopped.
    """
    rng = np.random.default_rng([seed, DEMO_SEED_STREAM])
    loss = 0.0
    for step in range(config.steps):
        if should_stop():
            return None
        demos = [demo for _ in range(config.episodes_per_step) for demo in demonstrate(rng)]
        shards = [demos[i :: engine.data_size] for i in range(min(engine.data_size, len(demos)))]
        loss = _step(engine, [pack_demonstrations(shard) for shard in shards], _hyperparameters(config, step))
        if step % 10 == 9 or step + 1 == config.steps:
            progress(step + 1, config.steps)
    engine.reset_optimizer()
    logger.info("warm start: %d steps, last loss %.3f nats per token", config.steps, loss)
    return loss


def _step(engine: TrainEngine[Sampled], batch: list[PackedInput], hyperparameters: Hyperparameters) -> float:
    """Return the loss per token of this rank's demonstrations; 0 if it has none."""
    losses = SupervisedLosses(sum(len(x.positions) for x in batch))
    engine.train(batch, losses.of_policy, hyperparameters)
    return merge_all(losses.gauges).get("loss", Partial("mean", 0.0)).value


def _hyperparameters(config: WarmStartConfig, step: int) -> Hyperparameters:
    rate = plateau_rate(
        step,
        peak=config.learning_rate,
        warmup_steps=config.warmup_steps,
        total_steps=config.steps,
        final_ratio=config.final_lr_ratio,
    )
    return Hyperparameters(rate, config.weight_decay)
