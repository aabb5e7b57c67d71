"""REINFORCE leave-one-out (arXiv:2402.14740)."""

import torch
from torch import Tensor


def leave_one_out(rewards: Tensor, group: Tensor) -> Tensor:
    """Subtract the mean of the group's other rewards; a group of one gives 0. All [T]."""
    if not len(rewards):
        return rewards.clone()
    size = torch.bincount(group).to(rewards.dtype)
    total = torch.zeros_like(size).index_add_(0, group, rewards)
    num_others = (size - 1)[group]
    baseline = (total[group] - rewards) / num_others.clamp(min=1)
    return torch.where(num_others > 0, rewards - baseline, torch.zeros_like(rewards))
