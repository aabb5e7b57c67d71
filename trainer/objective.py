"""From a batch and the configuration to what is minimised.

    targets = prepare(batch, config, kl_coef=..., old_logprobs=..., ref_logprobs=..., values=..., num_minibatches=...)
    loss, gauges = policy_loss(config, logprobs, entropy, targets.at(micro.index))
    loss = critic_loss(config, values, targets.at(micro.index))

Losses of micro-batches and ranks add up to the optimizer step's, and those of a pass over the batch to `num_minibatches`
times the batch's: each token carries its weight. An engine that averages gradients over W ranks must multiply by W. Every
rank prepares the whole batch (it is small: M floats a piece), so that whitening and denominators are global.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.telemetry import Partial
from trainer.advantages import estimate, token_rewards
from trainer.algorithms.aggregation import token_weights
from trainer.algorithms.corrections import truncated_importance_weights
from trainer.algorithms.kl import KL_PENALTIES, k3
from trainer.algorithms.ppo import clipped_surrogate
from trainer.algorithms.ratio import TokenLosses
from trainer.algorithms.tis import truncated_importance_sampling
from trainer.algorithms.value import value_loss
from trainer.batch import Batch
from trainer.config import AlgorithmConfig
from trainer.gauges import loss_gauges, policy_gauges


@dataclass(frozen=True, slots=True)
class Targets:
    """What the losses need of each sampled token, all [M] float32 and constant."""

    advantages: Tensor
    weights: Tensor
    """The token's share of its optimizer step's loss: `trainer.algorithms.aggregation`."""
    old_logprobs: Tensor
    behavior_logprobs: Tensor
    ref_logprobs: Tensor | None = None
    returns: Tensor | None = None
    old_values: Tensor | None = None
    fresh: Tensor | None = None
    """[M] bool: the learner's present version sampled the token and all before it, so the logprobs should be equal."""
    token_share: float = 0.0
    """One token's share of the tokens of an optimizer step."""
    kl_in_reward: float = 0.0
    """KL to the reference per token, averaged over each trajectory and then over trajectories: for the controller."""

    def at(self, index: Tensor, device: torch.device | None = None) -> "Targets":
        """The same of some tokens, on `device` if one is given; index: [m] int64."""

        def pick(values: Tensor) -> Tensor:
            return values[index] if device is None else values[index].to(device)

        def pick_some(values: Tensor | None) -> Tensor | None:
            return None if values is None else pick(values)

        return Targets(
            pick(self.advantages),
            pick(self.weights),
            pick(self.old_logprobs),
            pick(self.behavior_logprobs),
            pick_some(self.ref_logprobs),
            pick_some(self.returns),
            pick_some(self.old_values),
            pick_some(self.fresh),
            self.token_share,
            self.kl_in_reward,
        )


def prepare(
    batch: Batch,
    config: AlgorithmConfig,
    *,
    kl_coef: float = 0.0,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    values: Tensor | None = None,
    version: int | None = None,
    num_minibatches: int = 1,
) -> Targets:
    """Rewards to advantages, and what else is fixed before the first optimizer step.

    old_logprobs: the learner's own at the start of the step, or None for the engine's; ref_logprobs, values: [M] or None;
    version: the weights that the learner holds at the start of the step; num_minibatches: optimizer steps per pass.

    Raises:
        ValueError: `old_logprobs`, `ref_logprobs` or `values` is missing though the configuration needs it.
    """
    if config.old_logprobs == "recompute" and old_logprobs is None:
        raise ValueError("old_logprobs: recompute needs the learner's own logprobs")
    if config.needs_reference and ref_logprobs is None:
        raise ValueError("a KL penalty needs the reference's logprobs")
    old = batch.behavior_logprobs if old_logprobs is None else old_logprobs
    rewards, kl_mean = token_rewards(config, batch), 0.0
    if config.add_token_level_kl and ref_logprobs is not None:
        kl = KL_PENALTIES[config.kl_penalty](old, ref_logprobs)
        rewards = rewards - kl_coef * kl
        kl_mean = float((kl * token_weights(batch.trajectory, "seq-mean-token-mean")).sum())
    advantages, returns = estimate(config, batch, rewards, values)
    steps = max(1, min(num_minibatches, batch.num_sequences))
    return Targets(
        advantages=advantages,
        weights=token_weights(batch.trajectory, config.loss_agg_mode) * steps,
        old_logprobs=old,
        behavior_logprobs=batch.behavior_logprobs,
        ref_logprobs=ref_logprobs,
        returns=returns,
        old_values=values,
        fresh=None if version is None else batch.sampled_by(version),
        token_share=steps / batch.num_sampled if batch.num_sampled else 0.0,
        kl_in_reward=kl_mean,
    )


def _ppo(config: AlgorithmConfig, logprobs: Tensor, targets: Targets) -> TokenLosses:
    return clipped_surrogate(
        logprobs,
        targets.old_logprobs,
        targets.advantages,
        clip_low=config.pg_clip if config.pg_clip_low is None else config.pg_clip_low,
        clip_high=config.pg_clip if config.pg_clip_high is None else config.pg_clip_high,
        dual_clip=config.dual_clip,
    )


def _tis(config: AlgorithmConfig, logprobs: Tensor, targets: Targets) -> TokenLosses:
    return truncated_importance_sampling(
        logprobs, targets.old_logprobs, targets.advantages, upper_bound=config.tis_upper_bound
    )


POLICY_LOSSES: dict[str, Callable[[AlgorithmConfig, Tensor, Targets], TokenLosses]] = {"ppo": _ppo, "tis": _tis}
"""By the config's `pg_variant`."""


def policy_loss(
    config: AlgorithmConfig, logprobs: Tensor, entropy: Tensor, targets: Targets
) -> tuple[Tensor, dict[str, Partial]]:
    """The loss of one micro-batch and gauges that merge over micro-batches and ranks.

    logprobs, entropy: [m] float32, of the micro-batch's sampled tokens; targets: `Targets.at` of the same.
    """
    surrogate = POLICY_LOSSES[config.pg_variant](config, logprobs, targets)
    pg_loss = surrogate.loss
    if config.old_logprobs == "recompute" and config.is_correction_cap is not None:
        pg_loss = pg_loss * truncated_importance_weights(
            targets.old_logprobs, targets.behavior_logprobs, config.is_correction_cap
        )
    terms = {"actor/pg_loss": pg_loss}
    total = pg_loss
    if config.entropy_loss_coef:
        total = total - config.entropy_loss_coef * entropy
    if config.use_kl_loss and targets.ref_logprobs is not None:
        terms["actor/kl_loss"] = k3(logprobs, targets.ref_logprobs)
        total = total + config.kl_loss_coef * terms["actor/kl_loss"]
    terms["actor/total_loss"] = total
    gauges = policy_gauges(
        surrogate,
        logprobs,
        entropy,
        targets.advantages,
        targets.old_logprobs,
        targets.behavior_logprobs,
        targets.fresh,
    )
    return (total * targets.weights).sum(), gauges | loss_gauges(terms, targets.weights, targets.token_share)


def critic_loss(config: AlgorithmConfig, values: Tensor, targets: Targets) -> tuple[Tensor, dict[str, Partial]]:
    """The value loss of one micro-batch, a mean over tokens whatever `loss_agg_mode` says. values: [m] float32."""
    if targets.returns is None or targets.old_values is None:
        raise ValueError("the critic's loss needs returns and old values: adv_estimator gae")
    loss = value_loss(values, targets.old_values, targets.returns, clip=config.value_clip)
    weights = torch.full_like(loss, targets.token_share)
    return (loss * weights).sum(), loss_gauges({"critic/loss": loss}, weights, targets.token_share)
