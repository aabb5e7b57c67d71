"""Policy and critic losses of micro-batches.

Losses of micro-batches and ranks sum to the optimizer step's, those of a pass to `num_minibatches` times the batch's;
engines that average gradients over W ranks must multiply by W.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.services.telemetry import Partial
from offbeat.trainer.algorithms.aipo import one_sided_policy_gradient
from offbeat.trainer.algorithms.cispo import clipped_weight_policy_gradient
from offbeat.trainer.algorithms.dppo import divergence_masked_surrogate
from offbeat.trainer.algorithms.kimi15 import mirror_descent
from offbeat.trainer.algorithms.kl import KL_PENALTIES
from offbeat.trainer.algorithms.ppo import clipped_surrogate
from offbeat.trainer.algorithms.proximal import proximal_logprobs
from offbeat.trainer.algorithms.ratio import TokenLosses, unit_ratio
from offbeat.trainer.algorithms.sapo import soft_gated_surrogate
from offbeat.trainer.algorithms.tis import truncated_importance_sampling
from offbeat.trainer.algorithms.topr import tapered_policy_gradient
from offbeat.trainer.algorithms.value import value_loss
from offbeat.trainer.algorithms.vanilla import policy_gradient
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.config.user_function import is_function
from offbeat.trainer.data.batch import MicroBatch
from offbeat.trainer.data.user_functions import compute_loss
from offbeat.trainer.losses.corrections import correct
from offbeat.trainer.losses.metrics import correction_gauges, loss_gauges, policy_gauges
from offbeat.trainer.losses.targets import Targets, ValueTargets
from offbeat.trainer.models.policy import Sampled


@dataclass(frozen=True, slots=True)
class LossInputs:
    """All [m]. ratio: to the old policy, at `ratio_type`."""

    logprobs: Tensor
    old_logprobs: Tensor
    behavior_logprobs: Tensor
    ratio: Tensor
    advantages: Tensor


def _ppo(config: AlgorithmConfig, terms: LossInputs) -> TokenLosses:
    return clipped_surrogate(
        terms.ratio,
        terms.advantages,
        clip_low=config.pg_clip if config.pg_clip_low is None else config.pg_clip_low,
        clip_high=config.pg_clip if config.pg_clip_high is None else config.pg_clip_high,
        dual_clip=config.dual_clip,
    )


def _vanilla(_: AlgorithmConfig, terms: LossInputs) -> TokenLosses:
    return policy_gradient(terms.ratio, terms.logprobs, terms.advantages)


def _tis(config: AlgorithmConfig, terms: LossInputs) -> TokenLosses:
    return truncated_importance_sampling(
        terms.ratio,
        terms.logprobs,
        terms.advantages,
        lower_bound=config.tis_lower_bound,
        upper_bound=config.tis_upper_bound,
    )


def _cispo(config: AlgorithmConfig, terms: LossInputs) -> TokenLosses:
    return clipped_weight_policy_gradient(
        terms.ratio,
        terms.logprobs,
        terms.advantages,
        epsilon_low=config.cispo_epsilon_low,
        epsilon_high=config.cispo_epsilon_high,
        unified_mask=config.cispo_use_unified_mask,
    )


def _topr(config: AlgorithmConfig, terms: LossInputs) -> TokenLosses:
    return tapered_policy_gradient(
        terms.ratio,
        terms.logprobs,
        terms.advantages,
        positive_weight=config.topr_positive_weight,
        negative_weight=config.topr_negative_weight,
    )


def _kimi15(config: AlgorithmConfig, terms: LossInputs) -> TokenLosses:
    return mirror_descent(terms.ratio, terms.logprobs, terms.old_logprobs, terms.advantages, tau=config.kimi15_tau)


def _aipo(config: AlgorithmConfig, terms: LossInputs) -> TokenLosses:
    return one_sided_policy_gradient(terms.logprobs, terms.behavior_logprobs, terms.advantages, rho=config.aipo_rho)


def _dppo_tv(config: AlgorithmConfig, terms: LossInputs) -> TokenLosses:
    return divergence_masked_surrogate(
        terms.logprobs,
        terms.behavior_logprobs,
        terms.advantages,
        mask_low=config.dppo_mask_low,
        mask_high=config.dppo_mask_high,
        kl_tau=config.dppo_kl_tau,
    )


def _sapo(config: AlgorithmConfig, terms: LossInputs) -> TokenLosses:
    return soft_gated_surrogate(
        terms.ratio,
        terms.advantages,
        temperature_pos=config.sapo_temperature_pos,
        temperature_neg=config.sapo_temperature_neg,
    )


POLICY_LOSSES: dict[str, Callable[[AlgorithmConfig, LossInputs], TokenLosses]] = {
    "ppo": _ppo,
    "vanilla": _vanilla,
    "tis": _tis,
    "cispo": _cispo,
    "topr": _topr,
    "kimi15": _kimi15,
    "aipo": _aipo,
    "dppo_tv": _dppo_tv,
    "sapo": _sapo,
    "gpg": _vanilla,
}
"""By `pg_variant`; `gpg` is `vanilla` with scaled `Targets.pg_weights`."""


def policy_loss(
    config: AlgorithmConfig,
    logprobs: Tensor,
    entropy: Tensor,
    targets: Targets,
    entropy_coef: float | None = None,
    divergence: Tensor | None = None,
) -> tuple[Tensor, dict[str, Partial]]:
    """Return a micro-batch's loss and mergeable gauges.

    logprobs, entropy: [m]; targets: `Targets.at` these tokens; divergence: [m], KL to the reference over the
    vocabulary, for `kl_loss_type: full`.
    """
    entropy_coef = config.entropy_loss_coef if entropy_coef is None else entropy_coef
    surrogate, old = surrogate_losses(config, logprobs, targets)
    pg_loss, correction_metrics = _apply_correction(
        config, surrogate.loss, compared_logprobs(config, logprobs, old), targets
    )
    terms = {"actor/pg_loss": pg_loss}
    total = pg_loss
    if entropy_coef:
        total = total - entropy_coef * entropy
    kl = divergence if config.kl_in_loss_is_full else _estimate_kl(config, logprobs, targets)
    if kl is not None:
        terms["actor/kl_loss"] = kl
        total = total + config.kl_loss_coef * terms["actor/kl_loss"]
    terms["actor/total_loss"] = total
    gauges = policy_gauges(
        surrogate,
        logprobs,
        entropy,
        targets.advantages,
        old,
        targets.behavior_logprobs,
        targets.fresh,
    )
    loss = (total * targets.weights).sum()
    return loss, gauges | correction_metrics | loss_gauges(terms, targets.weights, targets.token_share)


def surrogate_losses(config: AlgorithmConfig, logprobs: Tensor, targets: Targets) -> tuple[TokenLosses, Tensor]:
    """Return the policy loss before corrections, and the old policy's logprobs."""
    old = logprobs.detach() if targets.old_is_present else targets.old_logprobs
    if targets.proximal is not None:
        old = proximal_logprobs(logprobs, targets.behavior_logprobs, targets.proximal)
    ratio = unit_ratio(config.ratio_type, logprobs, old, targets.turn, targets.sequence)
    terms = LossInputs(logprobs, old, targets.behavior_logprobs, ratio, targets.advantages)
    if is_function(config.pg_variant):
        return compute_loss(config.pg_variant, terms, ratio), old
    return POLICY_LOSSES[config.pg_variant](config, terms), old


def compared_logprobs(config: AlgorithmConfig, logprobs: Tensor, old: Tensor) -> Tensor:
    """Return the logprobs compared with the behavior policy's."""
    return logprobs if config.old_logprobs == "behavior" else old


def _estimate_kl(config: AlgorithmConfig, logprobs: Tensor, targets: Targets) -> Tensor | None:
    if not config.use_kl_loss or targets.ref_logprobs is None:
        return None
    return KL_PENALTIES[config.kl_loss_type](logprobs, targets.ref_logprobs)


def _apply_correction(
    config: AlgorithmConfig, pg_loss: Tensor, compared: Tensor, targets: Targets
) -> tuple[Tensor, dict[str, Partial]]:
    """Weight and mask the loss. compared: [m]."""
    correction = correct(config.train_infer_correction, compared, targets)
    if correction.weight is not None:
        pg_loss = pg_loss * correction.weight
    if targets.pg_weights is not None:
        pg_loss = pg_loss * targets.pg_weights
    if correction.kept is not None:
        pg_loss = torch.where(correction.kept, pg_loss, torch.zeros_like(pg_loss))
    return pg_loss, correction_gauges(correction.weight, correction.cut, correction.kept, targets.advantages)


def critic_loss(
    config: AlgorithmConfig, values: Tensor, targets: Targets | ValueTargets
) -> tuple[Tensor, dict[str, Partial]]:
    """Return a micro-batch's value loss, a mean over tokens (turns with `gae_level: turn`), and gauges. values: [m]

    Raises:
        ValueError: targets without returns.
    """
    if targets.returns is None or targets.old_values is None or targets.critic_weights is None:
        raise ValueError("the critic's loss needs returns and old values: adv_estimator gae")
    loss = value_loss(values, targets.old_values, targets.returns, clip=config.value_clip)
    weights = targets.critic_weights
    return (loss * weights).sum(), loss_gauges({"critic/loss": loss}, weights, targets.token_share)


@dataclass(frozen=True, slots=True)
class StepLosses:
    """Loss functions for `TrainEngine.train`."""

    config: LearnerConfig
    micro: Sequence[MicroBatch]
    targets: Targets
    entropy_coef: float
    device: torch.device
    gauges: list[dict[str, Partial]] = field(default_factory=list[dict[str, Partial]])
    seen: Tensor | None = None
    """Receives logprobs, [M]."""

    def of_policy(self, i: int, output: Sampled) -> Tensor:
        """Return the loss of policy and value head, if any."""
        targets = self.targets.at(self.micro[i].index, self.device)
        loss, gauges = policy_loss(
            self.config, output.logprobs, output.entropies, targets, self.entropy_coef, output.divergences
        )
        if self.seen is not None:
            self.seen[self.micro[i].index] = output.logprobs.detach().to("cpu", self.seen.dtype)
        mismatch = (output.logprobs.detach() - targets.behavior_logprobs).abs().max()
        self.gauges.append({**gauges, "actor/mismatch_abs_max": Partial("max", float(mismatch))})
        return loss + self.of_head(i, output) if self.config.has_value_head else loss

    def of_head(self, i: int, output: Sampled) -> Tensor:
        targets = self.targets.at(self.micro[i].index, self.device)
        loss, gauges = critic_loss(self.config, values_of(output), targets)
        self.gauges.append(dict(gauges))
        return self.config.critic.vf_coef * loss


def values_of(output: Sampled) -> Tensor:
    """Return the value head's output.

    Raises:
        ValueError: no value head.
    """
    if output.values is None:
        raise ValueError("critic.backbone policy needs a policy with a value head")
    return output.values


def all_of(output: Sampled) -> Tensor:
    """Stack logprobs, divergences, values and those after the tokens, if present: [1 to 4, M]."""
    rows = (output.logprobs, output.divergences, output.values, output.next_values)
    return torch.stack([row for row in rows if row is not None])
