"""Rewards of an episode by reward function, kept apart."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.services.messages.types import Trajectory
from offbeat.services.reward.config import COLUMN
from offbeat.trainer.algorithms.gdpo import decoupled_sum
from offbeat.trainer.config.algorithm import AlgorithmConfig


class RewardParts(NamedTuple):
    """names: of K reward functions; values: [T, K] float64, NaN where a function did not score; total: [T] float64."""

    names: tuple[str, ...]
    values: Tensor
    total: Tensor

    def weighted(self, weights: Mapping[str, float]) -> tuple[Tensor, Tensor]:
        """Return parts [T, K + 1] and weights [K + 1]; the last part is the rest of the total (env, shaping).

        weights: by name; of 0 for others.
        """
        factors = torch.tensor([weights.get(name, 0.0) for name in self.names], dtype=torch.float64)
        rest = self.total - (self.values.nan_to_num() * factors).sum(1)
        return torch.cat([self.values, rest[:, None]], 1), torch.cat([factors, factors.new_ones(1)])


def read_reward_parts(trajectories: Sequence[Trajectory]) -> RewardParts:
    """Read the rewards of T trajectories from their columns."""
    names = sorted({name for each in trajectories for name in each.metrics if name.startswith(COLUMN)})
    rows = [[each.metrics.get(name, math.nan) for name in names] for each in trajectories]
    values = torch.tensor(rows, dtype=torch.float64).reshape(len(trajectories), len(names))
    total = torch.tensor([each.reward for each in trajectories], dtype=torch.float64)
    return RewardParts(tuple(name.removeprefix(COLUMN) for name in names), values, total)


def decoupled_rewards(config: AlgorithmConfig, parts: RewardParts, group: Tensor) -> Tensor:
    """Return the weighted sum of each episode's rewards, normalized one by one within groups, [T] float64."""
    values, weights = parts.weighted(config.reward_weights)
    return decoupled_sum(values, weights, group, scale=config.reward_method == "mean_std")
