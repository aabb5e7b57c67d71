"""Maximum-likelihood reinforcement learning (MaxRL, arXiv:2602.02710)."""

import torch
from torch import Tensor

from offbeat.trainer.algorithms.normalization import group_moments


def mean_normalized(rewards: Tensor, group: Tensor, eps: float = 1e-6) -> Tensor:
    """Return (r - mean) / mean per group, or 0 without a positive mean.

    With rewards 0 and 1, an unbiased gradient of the log success rate truncated at the group's size. Clamped to [-1, n
    - 1], the range of nonnegative rewards in a group of n.

    rewards (nonnegative), group: [T] -> [T]
    """
    moments = group_moments(rewards, group)
    ratio = (rewards.double() - moments.mean) / (moments.mean + eps)
    ratio = torch.minimum(ratio.clamp(min=-1.0), moments.size - 1)
    return torch.where(moments.mean > eps, ratio, 0.0).to(rewards)
