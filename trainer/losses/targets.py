"""Constants of the losses, computed before the first optimizer step.

Every rank prepares the whole batch: whitening, masks and denominators are global.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from offbeat.trainer.algorithms.aggregation import NO_MASKED, MaskedCounts, token_weights
from offbeat.trainer.algorithms.distillation import teacher_advantages
from offbeat.trainer.algorithms.gpg import informative_share_inverse
from offbeat.trainer.algorithms.kl import KL_PENALTIES
from offbeat.trainer.algorithms.m2po import second_moment_mask
from offbeat.trainer.algorithms.normalization import RunningMoments, constant_groups, sum_by_group
from offbeat.trainer.algorithms.proximal import proximal_share
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.estimators import DECOUPLED, TURN_WISE
from offbeat.trainer.data.batch import Batch
from offbeat.trainer.data.selection import episode_weights, trained_episodes
from offbeat.trainer.losses.advantages import (
    AdvantageEstimate,
    bootstrap,
    estimate,
    scale_rewards,
    token_rewards,
)


@dataclass(frozen=True, slots=True)
class Targets:
    """Constants per sampled token, [M]."""

    advantages: Tensor
    weights: Tensor
    """In the optimizer step's loss (`trainer.algorithms.aggregation`); 0 for masked episodes."""
    old_logprobs: Tensor
    behavior_logprobs: Tensor
    turn: Tensor
    """int64, like `sequence`: units of ratios and corrections."""
    sequence: Tensor
    ref_logprobs: Tensor | None = None
    returns: Tensor | None = None
    old_values: Tensor | None = None
    critic_weights: Tensor | None = None
    pg_weights: Tensor | None = None
    """Factors of the policy loss: episode weights and GPG's scale."""
    trusted: Tensor | None = None
    """Bool: kept by M2PO."""
    old_is_present: bool = False
    """Whether the only pass's logprobs serve as `old_logprobs`."""
    proximal: Tensor | None = None
    """From `proximal_share`."""
    fresh: Tensor | None = None
    """Bool: sampled, with all earlier ones, by the current version; logprobs should be equal."""
    token_share: float = 0.0
    """1 / tokens per optimizer step."""
    teacher_kl: float | None = None
    """Mean weighted KL to the teachers per token."""
    kl_in_reward: float = 0.0
    """KL to the reference: mean over tokens, then trajectories."""

    def at(self, index: Tensor, device: torch.device | None = None) -> "Targets":
        selected: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                selected[field.name] = value[index] if device is None else value[index].to(device)
        return replace(self, **selected)


@dataclass(frozen=True, slots=True)
class ValueTargets:
    """Those of `Targets` that the critic's loss needs."""

    returns: Tensor
    old_values: Tensor
    critic_weights: Tensor
    token_share: float

    def at(self, index: Tensor, device: torch.device) -> "ValueTargets":
        parts = (self.returns, self.old_values, self.critic_weights)
        returns, old_values, weights = (part[index].to(device) for part in parts)
        return ValueTargets(returns, old_values, weights, self.token_share)


def build_targets(
    batch: Batch,
    config: AlgorithmConfig,
    *,
    kl_coef: float = 0.0,
    old_logprobs: Tensor | None = None,
    old_is_present: bool = False,
    ref_logprobs: Tensor | None = None,
    divergences: Tensor | None = None,
    teacher_logprobs: Tensor | None = None,
    values: Tensor | None = None,
    next_values: Tensor | None = None,
    version: int | None = None,
    num_minibatches: int = 1,
    running: RunningMoments | None = None,
    masked: MaskedCounts = NO_MASKED,
) -> Targets:
    """Compute the constants of the losses.

    old_logprobs: [M], the learner's at the start of the step, None for the engine's; old_is_present: of the only pass;
    ref_logprobs, values: [M]; next_values: [M], after the tokens, for `bootstrap_truncated`; divergences: [M], KL to
    the reference over the vocabulary at the start; teacher_logprobs: [K, M], as `config.teacher`, ignored outside
    `teacher_mask`; version: the learner's at the start; num_minibatches: per pass; running: for `norm_mean_type:
    running`; masked: counted in denominators.

    Raises:
        ValueError: a needed input is None.
    """
    _check(config, old_logprobs, ref_logprobs, version, old_is_present=old_is_present)
    old = batch.behavior_logprobs if old_logprobs is None else old_logprobs
    rewards, kl_mean = token_rewards(config, batch, running, masked), 0.0
    kl = _kl_in_reward(config, old, ref_logprobs, divergences)
    if kl is not None:
        rewards = rewards - kl_coef * kl
        kl_mean = float((kl * token_weights(batch.trajectory, "seq-mean-token-mean")).sum())
    if config.whiten_rewards:
        rewards = scale_rewards(config, batch, rewards)
    trained = trained_episodes(batch, config)[batch.trajectory]
    distilled = _distilled(config, batch, old, teacher_logprobs)
    estimated = estimate(
        config, batch, rewards, values, old_logprobs, trained, distilled, bootstrap(config, batch, next_values)
    )
    steps = max(1, min(num_minibatches, batch.num_sequences))
    share = steps / batch.num_sampled if batch.num_sampled else 0.0
    return Targets(
        advantages=estimated.advantages,
        weights=_weights(config, batch, trained, masked) * steps,
        old_logprobs=old,
        behavior_logprobs=batch.behavior_logprobs,
        turn=batch.turn,
        sequence=batch.sequence,
        ref_logprobs=ref_logprobs,
        returns=estimated.returns,
        old_values=values,
        critic_weights=_critic_weights(estimated, share, steps),
        pg_weights=_pg_weights(config, batch, estimated.advantages, masked),
        trusted=_trusted(config, old - batch.behavior_logprobs),
        old_is_present=old_is_present,
        proximal=proximal_share(batch.versions, version or 0) if config.old_logprobs == "loglinear" else None,
        fresh=None if version is None else batch.sampled_by(version),
        token_share=share,
        teacher_kl=None if distilled is None else -float(distilled.mean()),
        kl_in_reward=kl_mean,
    )


def _kl_in_reward(
    config: AlgorithmConfig, old: Tensor, ref_logprobs: Tensor | None, divergences: Tensor | None
) -> Tensor | None:
    if config.kl_in_reward_is_full:
        if divergences is None:
            raise ValueError("kl_penalty: full needs divergences over the vocabulary")
        return divergences
    if not config.add_token_level_kl or ref_logprobs is None:
        return None
    return KL_PENALTIES[config.kl_penalty](old, ref_logprobs)


def apply_group_weights(targets: Targets, batch: Batch, weights: Sequence[float]) -> Targets:
    if all(weight == 1.0 for weight in weights):
        return targets
    token_factors = torch.tensor(weights)[batch.group[batch.trajectory]]
    if targets.pg_weights is not None:
        token_factors = targets.pg_weights * token_factors
    return replace(targets, pg_weights=token_factors)


def _check(
    config: AlgorithmConfig,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    version: int | None,
    *,
    old_is_present: bool,
) -> None:
    if config.old_logprobs == "recompute" and old_logprobs is None and not old_is_present:
        raise ValueError("old_logprobs: recompute needs the learner's own logprobs")
    if config.old_logprobs == "loglinear" and version is None:
        raise ValueError("old_logprobs: loglinear needs the learner's version")
    if config.needs_ref_logprobs and ref_logprobs is None:
        raise ValueError("a KL penalty needs the reference's logprobs")


def needs_initial_logprobs(config: AlgorithmConfig) -> bool:
    """Return whether initial logprobs are needed besides `old_logprobs`."""
    for_advantages = config.add_token_level_kl or config.distills or config.value_targets == "vtrace"
    return for_advantages or config.train_infer_correction.m2_threshold is not None


def teacher_mask(config: AlgorithmConfig, batch: Batch) -> Tensor:
    """Mask the tokens taught by each of `config.teacher`, [K, M] bool."""
    teachers = config.teacher.values()
    teaches_tag = torch.tensor([[each.teaches(tag) for tag in batch.tags] for each in teachers], dtype=torch.bool)
    return teaches_tag[:, batch.tag[batch.trajectory]]


def _distilled(
    config: AlgorithmConfig, batch: Batch, logprobs: Tensor, teacher_logprobs: Tensor | None
) -> Tensor | None:
    if not config.distills:
        return None
    if teacher_logprobs is None:
        raise ValueError("on-policy distillation needs the teachers' logprobs")
    coef = torch.tensor([[teacher.opd_kl_coef] for teacher in config.teacher.values()]) * teacher_mask(config, batch)
    return teacher_advantages(logprobs, teacher_logprobs, coef)


def _weights(config: AlgorithmConfig, batch: Batch, trained: Tensor, masked: MaskedCounts) -> Tensor:
    length = config.loss_agg_length or config.sequence_length
    if bool(trained.all()):
        return token_weights(batch.trajectory, config.loss_agg_mode, length, masked)
    weights = torch.zeros(batch.num_sampled)
    weights[trained] = token_weights(batch.trajectory[trained], config.loss_agg_mode, length, masked)
    return weights


def _critic_weights(estimated: AdvantageEstimate, token_share: float, steps: int) -> Tensor | None:
    if estimated.returns is None:
        return None
    if estimated.critic_share is None:
        return torch.full_like(estimated.returns, token_share)
    return estimated.critic_share * steps


def _pg_weights(config: AlgorithmConfig, batch: Batch, advantages: Tensor, masked: MaskedCounts) -> Tensor | None:
    by_episode = episode_weights(batch, config)
    weights = None if by_episode is None else by_episode[batch.trajectory]
    if config.pg_variant != "gpg" or not config.compares_siblings:
        return weights
    informative = ~constant_groups(batch.episode_reward, batch.group)
    if config.adv_estimator in (*TURN_WISE, *DECOUPLED):
        magnitudes = torch.zeros(batch.num_trajectories).index_add_(0, batch.trajectory, advantages.abs())
        informative = sum_by_group(magnitudes, batch.group)[batch.group] > 0
    counted = trained_episodes(batch, config) & (batch.lengths > 0)
    scale = informative_share_inverse(informative[counted], masked.sequences)
    return torch.full((batch.num_sampled,), scale) if weights is None else weights * scale


def _trusted(config: AlgorithmConfig, log_ratio: Tensor) -> Tensor | None:
    threshold = config.train_infer_correction.m2_threshold
    return None if threshold is None else second_moment_mask(log_ratio, threshold)
