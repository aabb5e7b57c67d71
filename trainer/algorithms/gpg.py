"""Group policy gradient (arXiv:2504.02546): the plain policy gradient, rescaled for groups that say nothing."""

import torch
from torch import Tensor


def informative_share_inverse(rewards: Tensor, group: Tensor, silent: int = 0, eps: float = 1e-6) -> float:
    """alpha = B / (B - M) of eq. 9: trajectories over those whose group's members differ in reward; 1 where none does.

    rewards: [T] float; group: [T] int64, 0-based; silent: trajectories beside these whose groups say nothing
    """
    if not len(rewards):
        return 1.0
    count = int(group.max()) + 1
    low = rewards.new_full((count,), torch.inf).scatter_reduce(0, group, rewards, "amin")
    high = rewards.new_full((count,), -torch.inf).scatter_reduce(0, group, rewards, "amax")
    informative = int(((high - low)[group] > eps).sum())
    return (len(rewards) + silent) / informative if informative else 1.0
