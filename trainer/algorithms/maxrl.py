"""Maximum-likelihood reinforcement learning (MaxRL, arXiv:2602.02710)."""

import torch
from torch import Tensor


def mean_normalized(rewards: Tensor, group: Tensor, eps: float = 1e-6) -> Tensor:
    """Return (r - mean) / mean per group, or 0 without a positive mean.

    With rewards 0 and 1, an unbiased gradient of the log success rate truncated at the group's size.

    rewards (nonnegative), group: [T] -> [T]
    """
    if not len(rewards):
        return rewards.clone()
    size = torch.bincount(group).to(rewards.dtype)
    mean = (torch.zeros_like(size).index_add_(0, group, rewards) / size.clamp(min=1))[group]
    return torch.where(mean > eps, (rewards - mean) / (mean + eps), torch.zeros_like(rewards))
