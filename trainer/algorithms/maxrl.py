"""Maximum-likelihood reinforcement learning (MaxRL, arXiv:2602.02710)."""

import torch
from torch import Tensor


def mean_normalized(rewards: Tensor, group: Tensor, eps: float = 1e-6) -> Tensor:
    """Return (r - mean) / mean per group: for rewards 0 and 1 an unbiased gradient of the log success rate truncated at the
    group's size, which weights rare successes more. A group whose mean is not positive gets zeros.

    rewards: [T] float, nonnegative; group: [T] int64, 0-based -> [T] float
    """
    if not len(rewards):
        return rewards.clone()
    size = torch.bincount(group).to(rewards.dtype)
    mean = (torch.zeros_like(size).index_add_(0, group, rewards) / size.clamp(min=1))[group]
    return torch.where(mean > eps, (rewards - mean) / (mean + eps), torch.zeros_like(rewards))
