"""Maximum-likelihood reinforcement learning (MaxRL, arXiv:2602.02710)."""

import torch
from torch import Tensor


def mean_normalized(rewards: Tensor, group: Tensor, eps: float = 1e-6) -> Tensor:
    """(r - mean) / mean over the group: with rewards of 0 and 1 an unbiased step on the log of the success rate, truncated
    at the group's size, so that rare successes weigh more. A group whose mean is not positive gives zeros.

    rewards: [T] float, not negative; group: [T] int64, 0-based -> [T] float
    """
    if not len(rewards):
        return rewards.clone()
    size = torch.bincount(group).to(rewards.dtype)
    mean = (torch.zeros_like(size).index_add_(0, group, rewards) / size.clamp(min=1))[group]
    return torch.where(mean > eps, (rewards - mean) / (mean + eps), torch.zeros_like(rewards))
