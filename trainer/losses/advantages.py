"""Advantages per sampled token, as configured.

Order (ROLL's): normalize episode rewards, clip, subtract KL, whiten, estimate, whiten, clip.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.trainer.algorithms.aggregation import NO_MASKED, MaskedCounts
from offbeat.trainer.algorithms.gae import generalized_advantages
from offbeat.trainer.algorithms.gdpo import batch_normalized
from offbeat.trainer.algorithms.gigpo import group_in_group
from offbeat.trainer.algorithms.maxrl import mean_normalized
from offbeat.trainer.algorithms.normalization import (
    EPS,
    Moments,
    RunningMoments,
    group_moments,
    normalize,
    normalize_by_group,
    whiten,
)
from offbeat.trainer.algorithms.opo import length_weighted_baseline
from offbeat.trainer.algorithms.ratio import token_ratio
from offbeat.trainer.algorithms.reinforce import discounted_returns
from offbeat.trainer.algorithms.remax import subtract_greedy_reward
from offbeat.trainer.algorithms.rloo import leave_one_out
from offbeat.trainer.algorithms.turn_gae import turn_advantages
from offbeat.trainer.algorithms.vtrace import vtrace
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.estimators import DECOUPLED, TURN_WISE
from offbeat.trainer.config.rewards import Over
from offbeat.trainer.config.user_function import is_function
from offbeat.trainer.data.batch import Batch
from offbeat.trainer.data.reward_parts import decoupled_rewards
from offbeat.trainer.data.user_functions import estimate_advantages


class AdvantageEstimate(NamedTuple):
    """All [M]. returns: regression target, None without a critic; critic_share: token's share of its loss, None if equal."""

    advantages: Tensor
    returns: Tensor | None = None
    critic_share: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """All [M]. logprobs: at the start of the step; distilled: the teachers' advantages; bootstrapped: values after cut
    episodes, else 0.
    """

    config: AlgorithmConfig
    batch: Batch
    rewards: Tensor
    values: Tensor | None
    logprobs: Tensor | None
    distilled: Tensor | None = None
    bootstrapped: Tensor | None = None

    @property
    def completed_rewards(self) -> Tensor:
        """Return rewards plus the discounted value after a cut, for a critic."""
        if self.bootstrapped is None:
            return self.rewards
        return self.rewards + self.config.gamma * self.bootstrapped


def _returns(inputs: AdvantageInputs) -> AdvantageEstimate:
    return AdvantageEstimate(discounted_returns(inputs.rewards, inputs.batch.last, inputs.config.gamma))


def _turn_rewards(batch: Batch, rewards: Tensor) -> Tensor:
    return torch.zeros(len(batch.owner)).index_add_(0, batch.turn, rewards)


def _turn_returns(inputs: AdvantageInputs) -> AdvantageEstimate:
    batch = inputs.batch
    returns = discounted_returns(_turn_rewards(batch, inputs.rewards), batch.last_turn, inputs.config.gamma)
    return AdvantageEstimate(returns[batch.turn])


def _gae(inputs: AdvantageInputs) -> AdvantageEstimate:
    config, batch, values = inputs.config, inputs.batch, inputs.values
    if values is None:
        raise ValueError("gae needs the critic's values")
    if config.gae_level == "turn":
        return _turn_gae(inputs, values)
    if config.value_targets == "vtrace":
        if inputs.logprobs is None:
            raise ValueError("vtrace needs the learner's own logprobs")
        ratio = token_ratio(inputs.logprobs, batch.behavior_logprobs)
        result = vtrace(
            inputs.completed_rewards,
            values,
            ratio,
            batch.last,
            gamma=config.gamma,
            lambd=config.lambd,
            rho_bar=config.vtrace_rho_bar,
            c_bar=config.vtrace_c_bar,
        )
        return AdvantageEstimate(result.advantages, result.targets)
    advantages = generalized_advantages(inputs.completed_rewards, values, batch.last, config.gamma, config.lambd)
    return AdvantageEstimate(advantages, advantages + values)


def _turn_gae(inputs: AdvantageInputs, values: Tensor) -> AdvantageEstimate:
    """Estimate GAE over turns with tokens."""
    config, batch = inputs.config, inputs.batch
    first = batch.turn.diff(prepend=batch.turn.new_full((1,), -1)) != 0
    rewards = _turn_rewards(batch, inputs.completed_rewards)[batch.turn[first]]
    owners = batch.trajectory[first]
    last_turn = owners.diff(append=owners.new_full((1,), -1)) != 0
    by_turn = turn_advantages(rewards, values[first], last_turn, config.gamma, config.lambd)
    advantages = by_turn[first.cumsum(0) - 1] if len(by_turn) else by_turn
    share = first.to(values.dtype) / first.sum().clamp(min=1)
    return AdvantageEstimate(advantages, advantages + values, share)


def _gigpo(inputs: AdvantageInputs) -> AdvantageEstimate:
    config, batch = inputs.config, inputs.batch
    by_turn = group_in_group(
        batch.episode_reward,
        batch.group,
        batch.score,
        batch.owner,
        batch.last_turn,
        batch.anchor,
        gamma=config.step_reward_gamma,
        episode_weight=config.episode_reward_weight,
        step_weight=config.step_reward_weight,
        scale=config.reward_method == "mean_std",
    )
    return AdvantageEstimate(by_turn[batch.turn])


def _step_returns(inputs: AdvantageInputs) -> AdvantageEstimate:
    config, batch = inputs.config, inputs.batch
    returns = discounted_returns(batch.score.double(), batch.last_turn, config.step_reward_gamma)
    grouping = {
        "traj_group_id": batch.group[batch.owner],
        "batch": torch.zeros_like(batch.owner),
        "tags": batch.tag[batch.owner],
        "state": batch.anchor,
    }[config.reward_normalization.grouping]
    method = config.reward_method
    normalized = normalize_by_group(returns, grouping, center=method != "identity", scale=method == "mean_std")
    return AdvantageEstimate(normalized.to(batch.score)[batch.turn])


def _teacher_advantages(inputs: AdvantageInputs) -> AdvantageEstimate:
    if inputs.distilled is None:
        raise ValueError("opd needs the teachers' logprobs")
    return AdvantageEstimate(inputs.distilled)


def _own(inputs: AdvantageInputs) -> AdvantageEstimate:
    return AdvantageEstimate(estimate_advantages(inputs.config.adv_estimator, inputs.rewards, inputs.batch))


ESTIMATORS: dict[str, Callable[[AdvantageInputs], AdvantageEstimate]] = {
    "gae": _gae,
    "gigpo": _gigpo,
    "step_reinforce": _step_returns,
    "agentic_reinforce": _turn_returns,
    "opd": _teacher_advantages,
}
"""By `adv_estimator`; others use discounted returns per token."""


def estimate(
    config: AlgorithmConfig,
    batch: Batch,
    rewards: Tensor,
    values: Tensor | None,
    logprobs: Tensor | None = None,
    trained: Tensor | None = None,
    distilled: Tensor | None = None,
    bootstrapped: Tensor | None = None,
) -> AdvantageEstimate:
    """Compute advantages from token rewards [M], whitened and clipped as configured.

    trained: [M] bool, tokens to whiten; distilled: [M], the teachers' advantages for `use_opd`; bootstrapped: from
    `bootstrap`.

    Raises:
        ValueError: `gae` without values, or `vtrace` without logprobs.
    """
    estimator = _own if is_function(config.adv_estimator) else ESTIMATORS.get(config.adv_estimator, _returns)
    result = estimator(AdvantageInputs(config, batch, rewards, values, logprobs, distilled, bootstrapped))
    advantages = result.advantages
    if config.whitens_advantages:
        advantages = _whiten_trained(config, batch, advantages, trained)
    if config.use_opd and distilled is not None:
        advantages = advantages + distilled
    if config.advantage_clip is not None:
        advantages = advantages.clamp(-config.advantage_clip, config.advantage_clip)
    return result._replace(advantages=advantages)


def bootstrap(config: AlgorithmConfig, batch: Batch, next_values: Tensor | None) -> Tensor | None:
    """Return the value after each cut episode's last token, 0 elsewhere, [M]; None if limits count as ends.

    It replaces the next observation's value.

    Raises:
        ValueError: `bootstrap_truncated` without values.
    """
    if not config.bootstrap_truncated:
        return None
    if next_values is None:
        raise ValueError("bootstrap_truncated needs the critic's values after tokens")
    return torch.where(batch.last & batch.cut[batch.trajectory], next_values, 0.0)


def _whiten_trained(config: AlgorithmConfig, batch: Batch, advantages: Tensor, trained: Tensor | None) -> Tensor:
    out = advantages.clone()
    for scope in _whitening_scopes(config, batch):
        chosen = scope if trained is None else scope & trained
        out[chosen] = whiten(advantages[chosen])
    return out


def scale_rewards(config: AlgorithmConfig, batch: Batch, rewards: Tensor) -> Tensor:
    """Divide rewards [M] by the deviation over their scope, without centering; equal ones stay as they are."""
    out = rewards.clone()
    for scope in _whitening_scopes(config, batch):
        if scope.sum() > 1 and (std := rewards[scope].std()) > EPS:
            out[scope] = rewards[scope] / (std + EPS)
    return out


def _whitening_scopes(config: AlgorithmConfig, batch: Batch) -> list[Tensor]:
    """Return a mask [M] for each set of tokens that are whitened together."""
    if config.whiten_over == "batch":
        return [torch.ones(batch.num_sampled, dtype=torch.bool)]
    tags = batch.tag[batch.trajectory]
    return [tags == tag for tag in tags.unique()]


def token_rewards(
    config: AlgorithmConfig, batch: Batch, running: RunningMoments | None = None, masked: MaskedCounts = NO_MASKED
) -> Tensor:
    """Return normalized episode rewards on trajectories' last tokens, or turn rewards on turns'. [M]"""
    if config.adv_estimator in TURN_WISE:  # these use `Batch.score`
        return batch.turn_reward
    if config.reward_method == "identity" and config.adv_estimator not in BASELINE_OF:
        return _clip(config, batch.turn_reward)
    rewards = torch.zeros(batch.num_sampled)
    rewards[batch.last] = episode_rewards(config, batch, running, masked)[batch.trajectory[batch.last]]
    return rewards


def episode_rewards(
    config: AlgorithmConfig, batch: Batch, running: RunningMoments | None = None, masked: MaskedCounts = NO_MASKED
) -> Tensor:
    """Return normalized and clipped episode rewards [T]. masked: counted in the batch's deviation.

    Raises:
        ValueError: running statistics are configured, but `running` is None.
    """
    baseline = BASELINE_OF.get(config.adv_estimator)
    if baseline is not None:
        return _clip(config, baseline(batch))
    if config.adv_estimator in DECOUPLED and batch.reward_parts is not None:
        sums = decoupled_rewards(config, batch.reward_parts, batch.group)
        return _clip(config, batch_normalized(sums, masked.episodes).to(batch.episode_reward))
    center = _moments(config.mean_over, config, batch, running) if config.mean_over else None
    scale = _moments(config.std_over, config, batch, running) if config.std_over else None
    return _clip(config, normalize(batch.episode_reward, center, scale))


def _moments(over: Over, config: AlgorithmConfig, batch: Batch, running: RunningMoments | None) -> Moments:
    if over == "running":
        if running is None:
            raise ValueError("norm_mean_type: running needs the trainer's running statistics")
        return running.moments([batch.tags[i] for i in batch.tag.tolist()])
    groups = {
        "traj_group_id": batch.group,
        "batch": torch.zeros_like(batch.group),
        "tags": batch.tag,
    }
    return group_moments(
        batch.episode_reward, groups["batch" if over == "batch" else config.reward_normalization.grouping]
    )


BASELINE_OF: dict[str, Callable[[Batch], Tensor]] = {
    "rloo": lambda batch: leave_one_out(batch.episode_reward, batch.group),
    "opo": lambda batch: length_weighted_baseline(batch.episode_reward, batch.lengths.float(), batch.group),
    "maxrl": lambda batch: mean_normalized(batch.episode_reward, batch.group),
    "remax": lambda batch: subtract_greedy_reward(batch.episode_reward, _greedy_rewards(batch), batch.group),
}
"""Rewards [T] less the baseline, by `adv_estimator`."""


def _greedy_rewards(batch: Batch) -> Tensor:
    if batch.greedy_reward is None:
        raise ValueError("remax needs a greedy episode for each group")
    return batch.greedy_reward


def _clip(config: AlgorithmConfig, rewards: Tensor) -> Tensor:
    return rewards if config.reward_clip is None else rewards.clamp(-config.reward_clip, config.reward_clip)
