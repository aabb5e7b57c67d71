"""From a packed batch and the configuration to advantages per sampled token.

The order is ROLL's: normalise the episodes' rewards, clip them, subtract the KL penalty, whiten, estimate, whiten, clip.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.trainer.algorithms.gae import generalized_advantages
from offbeat.trainer.algorithms.gigpo import group_in_group
from offbeat.trainer.algorithms.maxrl import mean_normalized
from offbeat.trainer.algorithms.normalization import (
    EPS,
    Moments,
    RunningMoments,
    moments_of_group,
    normalize,
    normalize_by_group,
    whiten,
)
from offbeat.trainer.algorithms.opo import length_weighted_baseline
from offbeat.trainer.algorithms.ratio import ratio_of
from offbeat.trainer.algorithms.reinforce import discounted_returns
from offbeat.trainer.algorithms.remax import less_greedy
from offbeat.trainer.algorithms.rloo import leave_one_out
from offbeat.trainer.algorithms.turn_gae import turn_advantages
from offbeat.trainer.algorithms.vtrace import vtrace
from offbeat.trainer.config.algorithm import TURN_WISE, AlgorithmConfig
from offbeat.trainer.config.rewards import Over
from offbeat.trainer.data.batch import Batch


class AdvantageEstimate(NamedTuple):
    """advantages: [M] float; returns: [M] float, what a critic should have said, or None without a critic; critic_share: [M]
    float, each token's share in the critic's loss, or None for equal ones."""

    advantages: Tensor
    returns: Tensor | None = None
    critic_share: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """What an estimator may look at. rewards: [M] float, per token; values, logprobs (the learner's own at the start of the
    step), distilled (what teachers make of each token): [M] float, or None where the configuration has none."""

    config: AlgorithmConfig
    batch: Batch
    rewards: Tensor
    values: Tensor | None
    logprobs: Tensor | None
    distilled: Tensor | None = None


def _returns(sight: AdvantageInputs) -> AdvantageEstimate:
    return AdvantageEstimate(discounted_returns(sight.rewards, sight.batch.last, sight.config.gamma))


def _turn_rewards(sight: AdvantageInputs) -> Tensor:
    """[R]: the sum of its tokens' rewards."""
    batch = sight.batch
    return torch.zeros(len(batch.owner)).index_add_(0, batch.turn, sight.rewards)


def _turn_returns(sight: AdvantageInputs) -> AdvantageEstimate:
    batch = sight.batch
    returns = discounted_returns(_turn_rewards(sight), batch.last_turn, sight.config.gamma)
    return AdvantageEstimate(returns[batch.turn])


def _gae(sight: AdvantageInputs) -> AdvantageEstimate:
    config, batch, values = sight.config, sight.batch, sight.values
    if values is None:
        raise ValueError("gae needs the critic's values")
    if config.gae_level == "turn":
        return _gae_of_turns(sight, values)
    if config.value_targets == "vtrace":
        if sight.logprobs is None:
            raise ValueError("vtrace needs the learner's own logprobs")
        ratio = ratio_of(sight.logprobs, batch.behavior_logprobs)
        found = vtrace(
            sight.rewards,
            values,
            ratio,
            batch.last,
            gamma=config.gamma,
            lambd=config.lambd,
            rho_bar=config.vtrace_rho_bar,
            c_bar=config.vtrace_c_bar,
        )
        return AdvantageEstimate(found.advantages, found.targets)
    advantages = generalized_advantages(sight.rewards, values, batch.last, config.gamma, config.lambd)
    return AdvantageEstimate(advantages, advantages + values)


def _gae_of_turns(sight: AdvantageInputs, values: Tensor) -> AdvantageEstimate:
    """A turn without a token has no value of its own and is skipped; its reward stands on a neighbour's token."""
    config, batch = sight.config, sight.batch
    first = batch.turn.diff(prepend=batch.turn.new_full((1,), -1)) != 0
    rewards = _turn_rewards(sight)[batch.turn[first]]
    owners = batch.trajectory[first]
    last_turn = owners.diff(append=owners.new_full((1,), -1)) != 0
    of_turn = turn_advantages(rewards, values[first], last_turn, config.gamma, config.lambd)
    advantages = of_turn[first.cumsum(0) - 1] if len(of_turn) else of_turn
    share = first.to(values.dtype) / first.sum().clamp(min=1)
    return AdvantageEstimate(advantages, advantages + values, share)


def _gigpo(sight: AdvantageInputs) -> AdvantageEstimate:
    config, batch = sight.config, sight.batch
    of_turn = group_in_group(
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
    return AdvantageEstimate(of_turn[batch.turn])


def _step_returns(sight: AdvantageInputs) -> AdvantageEstimate:
    config, batch = sight.config, sight.batch
    returns = discounted_returns(batch.score, batch.last_turn, config.step_reward_gamma)
    grouping = {
        "traj_group_id": batch.group[batch.owner],
        "batch": torch.zeros_like(batch.owner),
        "tags": batch.tag[batch.owner],
        "state": batch.anchor,
    }[config.reward_normalization.grouping]
    method = config.reward_method
    normalized = normalize_by_group(returns, grouping, center=method != "identity", scale=method == "mean_std")
    return AdvantageEstimate(normalized[batch.turn])


def _distilled(sight: AdvantageInputs) -> AdvantageEstimate:
    if sight.distilled is None:
        raise ValueError("opd needs the teachers' logprobs")
    return AdvantageEstimate(sight.distilled)


ESTIMATORS: dict[str, Callable[[AdvantageInputs], AdvantageEstimate]] = {
    "gae": _gae,
    "gigpo": _gigpo,
    "step_reinforce": _step_returns,
    "agentic_reinforce": _turn_returns,
    "opd": _distilled,
}
"""By the config's `adv_estimator`. The others take the discounted return of each token and differ in their rewards alone:
`episode_rewards`."""


def estimate(
    config: AlgorithmConfig,
    batch: Batch,
    rewards: Tensor,
    values: Tensor | None,
    logprobs: Tensor | None = None,
    trained: Tensor | None = None,
    distilled: Tensor | None = None,
) -> AdvantageEstimate:
    """Advantages of a batch from its token rewards [M], whitened and clipped as configured; returns stay as they are.

    trained: [M] bool, tokens whose statistics whiten; None for all of them. distilled: [M] float, the teachers' advantages,
    which `use_opd` adds to what is whitened.

    Raises:
        ValueError: `gae` without values, or `vtrace` without logprobs.
    """
    found = ESTIMATORS.get(config.adv_estimator, _returns)(
        AdvantageInputs(config, batch, rewards, values, logprobs, distilled)
    )
    advantages = found.advantages
    if config.whitens_advantages:
        advantages = _whitened(advantages, trained)
    if config.use_opd and distilled is not None:
        advantages = advantages + distilled
    if config.advantage_clip is not None:
        advantages = advantages.clamp(-config.advantage_clip, config.advantage_clip)
    return found._replace(advantages=advantages)


def _whitened(advantages: Tensor, trained: Tensor | None) -> Tensor:
    if trained is None or bool(trained.all()):
        return whiten(advantages)
    out = advantages.clone()
    out[trained] = whiten(advantages[trained])
    return out


def whitened_rewards(rewards: Tensor) -> Tensor:
    """Token rewards over their deviation; the mean stays, or every token would be paid for being there. [M] -> [M]"""
    if len(rewards) < 2:
        return rewards
    return rewards / (rewards.std() + EPS)


def token_rewards(config: AlgorithmConfig, batch: Batch, running: RunningMoments | None = None) -> Tensor:
    """[M]: where rewards are compared, each episode's on its trajectory's last token; else each turn's on the turn's."""
    if config.adv_estimator in TURN_WISE:  # these rate turns by `Batch.score`
        return batch.turn_reward
    if config.reward_method == "identity" and config.adv_estimator not in BASELINE_OF:
        return _clip(config, batch.turn_reward)
    rewards = torch.zeros(batch.num_sampled)
    rewards[batch.last] = episode_rewards(config, batch, running)[batch.trajectory[batch.last]]
    return rewards


def episode_rewards(config: AlgorithmConfig, batch: Batch, running: RunningMoments | None = None) -> Tensor:
    """[T]: compared as the estimator and the configuration say, then clipped.

    Raises:
        ValueError: running statistics are configured and `running` is None.
    """
    own = BASELINE_OF.get(config.adv_estimator)
    if own is not None:
        return _clip(config, own(batch))
    center = _moments(config.mean_over, config, batch, running) if config.mean_over else None
    scale = _moments(config.std_over, config, batch, running) if config.std_over else None
    return _clip(config, normalize(batch.episode_reward, center, scale))


def _moments(over: Over, config: AlgorithmConfig, batch: Batch, running: RunningMoments | None) -> Moments:
    if over == "running":
        if running is None:
            raise ValueError("running statistics are kept by the trainer, and none were given")
        return running.moments([batch.tags[i] for i in batch.tag.tolist()], batch.episode_reward)
    groups = {
        "traj_group_id": batch.group,
        "batch": torch.zeros_like(batch.group),
        "tags": batch.tag,
    }
    return moments_of_group(
        batch.episode_reward, groups["batch" if over == "batch" else config.reward_normalization.grouping]
    )


BASELINE_OF: dict[str, Callable[[Batch], Tensor]] = {
    "rloo": lambda batch: leave_one_out(batch.episode_reward, batch.group),
    "opo": lambda batch: length_weighted_baseline(batch.episode_reward, batch.lengths.float(), batch.group),
    "maxrl": lambda batch: mean_normalized(batch.episode_reward, batch.group),
    "remax": lambda batch: less_greedy(batch.episode_reward, _greedy_rewards(batch), batch.group),
}
"""[T] rewards as estimators compare them that have a way of their own."""


def _greedy_rewards(batch: Batch) -> Tensor:
    if batch.greedy_reward is None:
        raise ValueError("remax needs a greedy episode of each group")
    return batch.greedy_reward


def _clip(config: AlgorithmConfig, rewards: Tensor) -> Tensor:
    return rewards if config.reward_clip is None else rewards.clamp(-config.reward_clip, config.reward_clip)
