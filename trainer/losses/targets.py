"""What is fixed for a batch before the first optimizer step: advantages, weights, what the losses compare with.

    targets = prepare(batch, config, kl_coef=..., old_logprobs=..., ref_logprobs=..., values=..., num_minibatches=...)
    targets.at(micro.index)                         the same of one micro-batch

Every rank prepares the whole batch (it is small: M numbers a piece), so that whitening, masks and denominators are global.
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
from offbeat.trainer.algorithms.normalization import RunningMoments
from offbeat.trainer.algorithms.proximal import proximal_share
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.data.batch import Batch
from offbeat.trainer.data.selection import episode_weights, trained_episodes
from offbeat.trainer.losses.advantages import (
    AdvantageEstimate,
    estimate,
    token_rewards,
    whitened_rewards,
)


@dataclass(frozen=True, slots=True)
class Targets:
    """What the losses need of each sampled token, all [M] and constant."""

    advantages: Tensor
    weights: Tensor
    """The token's share of its optimizer step's loss: `trainer.algorithms.aggregation`; 0 where its episode is left out."""
    old_logprobs: Tensor
    behavior_logprobs: Tensor
    turn: Tensor
    """[M] int64: turns and continuous contexts that ratios are taken over."""
    sequence: Tensor
    ref_logprobs: Tensor | None = None
    returns: Tensor | None = None
    old_values: Tensor | None = None
    critic_weights: Tensor | None = None
    """The token's share of the critic's loss."""
    pg_weights: Tensor | None = None
    """What the token's policy loss is multiplied with: weights of episodes, GPG's scale."""
    trusted: Tensor | None = None
    """[M] bool: tokens that M2PO keeps."""
    old_is_present: bool = False
    """The pass is at the step's start: what the policy says there stands for `old_logprobs`."""
    proximal: Tensor | None = None
    """The token's share of the way from the behavior's to the policy's logprob: `offbeat.trainer.algorithms.proximal`."""
    fresh: Tensor | None = None
    """[M] bool: the learner's present version sampled the token and all before it, so the logprobs should be equal."""
    token_share: float = 0.0
    """One token's share of the tokens of an optimizer step."""
    teacher_kl: float | None = None
    """KL to the teachers per token, each times its coefficient."""
    kl_in_reward: float = 0.0
    """KL to the reference per token, averaged over each trajectory and then over trajectories: for the controller."""

    def at(self, index: Tensor, device: torch.device | None = None) -> "Targets":
        """The same of some tokens, on `device` if one is given; index: [m] int64."""
        picked: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                picked[field.name] = value[index] if device is None else value[index].to(device)
        return replace(self, **picked)


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
    version: int | None = None,
    num_minibatches: int = 1,
    running: RunningMoments | None = None,
    silent: MaskedCounts = NO_MASKED,
) -> Targets:
    """Rewards to advantages, and what else is fixed before the first optimizer step.

    old_logprobs: the learner's own at the start of the step, or None for the engine's; old_is_present: the one pass over the
    batch says them; ref_logprobs, values: [M] or None;
    divergences: [M], KL from the learner to the reference over the whole vocabulary at the start of the step, or None;
    teacher_logprobs: [K, M] in the order of `config.teacher`, or None; where a teacher does not teach they don't count;
    version: the weights that the learner holds at the start of the step; num_minibatches: optimizer steps per pass; running:
    the statistics that `norm_mean_type: running` compares with; silent: what the policy loss's denominators
    count beside the batch.

    Raises:
        ValueError: `old_logprobs`, `ref_logprobs`, `divergences`, `values`, `version` or `running` is missing though the
            configuration needs it.
    """
    _check(config, old_logprobs, ref_logprobs, version, old_is_present=old_is_present)
    old = batch.behavior_logprobs if old_logprobs is None else old_logprobs
    rewards, kl_mean = token_rewards(config, batch, running), 0.0
    kl = _kl_in_reward(config, old, ref_logprobs, divergences)
    if kl is not None:
        rewards = rewards - kl_coef * kl
        kl_mean = float((kl * token_weights(batch.trajectory, "seq-mean-token-mean")).sum())
    if config.whiten_rewards:
        rewards = whitened_rewards(rewards)
    trained = trained_episodes(batch, config)[batch.trajectory]
    distilled = _distilled(config, batch, old, teacher_logprobs)
    found = estimate(config, batch, rewards, values, old_logprobs, trained, distilled)
    steps = max(1, min(num_minibatches, batch.num_sequences))
    share = steps / batch.num_sampled if batch.num_sampled else 0.0
    return Targets(
        advantages=found.advantages,
        weights=_weights(config, batch, trained, silent) * steps,
        old_logprobs=old,
        behavior_logprobs=batch.behavior_logprobs,
        turn=batch.turn,
        sequence=batch.sequence,
        ref_logprobs=ref_logprobs,
        returns=found.returns,
        old_values=values,
        critic_weights=_critic_weights(found, share, steps),
        pg_weights=_pg_weights(config, batch, silent),
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
            raise ValueError("kl_penalty: full needs the KL over the vocabulary")
        return divergences
    if not config.add_token_level_kl or ref_logprobs is None:
        return None
    return KL_PENALTIES[config.kl_penalty](old, ref_logprobs)


def apply_group_weights(targets: Targets, batch: Batch, weights: Sequence[float]) -> Targets:
    """The same with each group's policy loss multiplied by its weight; weights: one for each group of the batch."""
    if all(weight == 1.0 for weight in weights):
        return targets
    of_token = torch.tensor(weights)[batch.group[batch.trajectory]]
    return replace(targets, pg_weights=of_token if targets.pg_weights is None else targets.pg_weights * of_token)


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
    """Whether targets are made of what the policy says at the step's start, besides what losses compare with."""
    of_rewards = config.add_token_level_kl or config.distills or config.value_targets == "vtrace"
    return of_rewards or config.train_infer_correction.m2_threshold is not None


def teacher_mask(config: AlgorithmConfig, batch: Batch) -> Tensor:
    """[K, M] bool: which tokens each of `config.teacher` teaches."""
    tags = [teacher.tag_included or batch.tags for teacher in config.teacher.values()]
    of_tag = torch.tensor([[tag in known for tag in batch.tags] for known in tags], dtype=torch.bool)
    return of_tag[:, batch.tag[batch.trajectory]]


def _distilled(
    config: AlgorithmConfig, batch: Batch, logprobs: Tensor, teacher_logprobs: Tensor | None
) -> Tensor | None:
    if not config.distills:
        return None
    if teacher_logprobs is None:
        raise ValueError("on-policy distillation needs the teachers' logprobs")
    coef = torch.tensor([[teacher.opd_kl_coef] for teacher in config.teacher.values()]) * teacher_mask(config, batch)
    return teacher_advantages(logprobs, teacher_logprobs, coef)


def _weights(config: AlgorithmConfig, batch: Batch, trained: Tensor, silent: MaskedCounts) -> Tensor:
    length = config.loss_agg_length or config.sequence_length
    if bool(trained.all()):
        return token_weights(batch.trajectory, config.loss_agg_mode, length, silent)
    weights = torch.zeros(batch.num_sampled)
    weights[trained] = token_weights(batch.trajectory[trained], config.loss_agg_mode, length, silent)
    return weights


def _critic_weights(found: AdvantageEstimate, token_share: float, steps: int) -> Tensor | None:
    if found.returns is None:
        return None
    if found.critic_share is None:
        return torch.full_like(found.returns, token_share)
    return found.critic_share * steps


def _pg_weights(config: AlgorithmConfig, batch: Batch, silent: MaskedCounts) -> Tensor | None:
    of_episode = episode_weights(batch, config)
    weights = None if of_episode is None else of_episode[batch.trajectory]
    if config.pg_variant != "gpg":
        return weights
    scale = informative_share_inverse(batch.episode_reward, batch.group, silent.sequences)
    return torch.full((batch.num_sampled,), scale) if weights is None else weights * scale


def _trusted(config: AlgorithmConfig, log_ratio: Tensor) -> Tensor | None:
    threshold = config.train_infer_correction.m2_threshold
    return None if threshold is None else second_moment_mask(log_ratio, threshold)
