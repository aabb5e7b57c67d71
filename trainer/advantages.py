"""From a packed batch and the configuration to advantages per sampled token.

The order is ROLL's: normalise the episodes' rewards, clip them, subtract the KL penalty, estimate, whiten, clip.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from services.schema import Group
from trainer.algorithms.gae import generalized_advantages
from trainer.algorithms.normalization import has_signal, normalize_by_group, whiten
from trainer.algorithms.reinforce import discounted_returns
from trainer.batch import Batch
from trainer.config import AlgorithmConfig


class Estimate(NamedTuple):
    """advantages: [M] float; returns: [M] float, what a critic should have said, or None without a critic."""

    advantages: Tensor
    returns: Tensor | None


Estimator = Callable[[AlgorithmConfig, Batch, Tensor, Tensor | None], Estimate]
"""(config, batch, rewards [M], values [M] or None) -> estimate."""


def _returns(config: AlgorithmConfig, batch: Batch, rewards: Tensor, _: Tensor | None) -> Estimate:
    return Estimate(discounted_returns(rewards, batch.last, config.gamma), None)


def _gae(config: AlgorithmConfig, batch: Batch, rewards: Tensor, values: Tensor | None) -> Estimate:
    if values is None:
        raise ValueError("gae needs the critic's values")
    advantages = generalized_advantages(rewards, values, batch.last, config.gamma, config.lambd)
    return Estimate(advantages, advantages + values)


ESTIMATORS: dict[str, Estimator] = {"gae": _gae, "grpo": _returns, "reinforce": _returns}
"""By the config's `adv_estimator`. `grpo` differs from `reinforce` in its rewards: `AlgorithmConfig.reward_method`."""


def estimate(config: AlgorithmConfig, batch: Batch, rewards: Tensor, values: Tensor | None) -> Estimate:
    """Advantages of a batch from its token rewards [M], whitened and clipped as configured; returns stay as they are.

    Raises:
        ValueError: `gae` without values.
    """
    advantages, returns = ESTIMATORS[config.adv_estimator](config, batch, rewards, values)
    if config.whiten_advantages:
        advantages = whiten(advantages)
    if config.advantage_clip is not None:
        advantages = advantages.clamp(-config.advantage_clip, config.advantage_clip)
    return Estimate(advantages, returns)


def token_rewards(config: AlgorithmConfig, batch: Batch) -> Tensor:
    """[M]: where rewards are normalised, each episode's on its trajectory's last token; else each turn's on the turn's."""
    if config.reward_method == "identity":
        return _clip(config, batch.turn_reward)
    rewards = torch.zeros(batch.num_sampled)
    rewards[batch.last] = episode_rewards(config, batch)[batch.trajectory[batch.last]]
    return rewards


def episode_rewards(config: AlgorithmConfig, batch: Batch) -> Tensor:
    """[T]: normalised over the configured grouping, then clipped."""
    grouping = {
        "traj_group_id": batch.group,
        "batch": torch.zeros_like(batch.group),
        "tags": batch.tag,
    }[config.reward_normalization.grouping]
    method = config.reward_method
    centered = normalize_by_group(
        batch.episode_reward, grouping, center=method != "identity", scale=method == "mean_std"
    )
    return _clip(config, centered)


def _clip(config: AlgorithmConfig, rewards: Tensor) -> Tensor:
    return rewards if config.reward_clip is None else rewards.clamp(-config.reward_clip, config.reward_clip)


def carries_signal(group: Group, config: AlgorithmConfig) -> bool:
    """Whether a step can learn from the group: where its members are compared with each other, not if all did equally well.

    What becomes of a group without signal is the caller's to do, by `config.zero_variance`; with `train` all carry one.
    """
    compared = config.reward_method != "identity" and config.reward_normalization.grouping == "traj_group_id"
    if not compared or config.zero_variance == "train":
        return True
    return has_signal(torch.tensor([trajectory.reward for trajectory in group.trajectories]))
