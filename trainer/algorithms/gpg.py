"""Group policy gradient (arXiv:2504.02546)."""

import torch
from torch import Tensor


def informative_share_inverse(rewards: Tensor, group: Tensor, num_masked: int = 0, eps: float = 1e-6) -> float:
    """Return alpha = B / (B - M) (eq. 9): trajectories over those of groups with differing rewards, 1 without any.

    rewards, group: [T]; num_masked: further trajectories without signal
    """
    if not len(rewards):
        return 1.0
    count = int(group.max()) + 1
    low = rewards.new_full((count,), torch.inf).scatter_reduce(0, group, rewards, "amin")
    high = rewards.new_full((count,), -torch.inf).scatter_reduce(0, group, rewards, "amax")
    informative = int(((high - low)[group] > eps).sum())
    return (len(rewards) + num_masked) / informative if informative else 1.0
