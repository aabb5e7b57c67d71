"""REINFORCE leave-one-out (arXiv:2402.14740)."""

import torch
from torch import Tensor

from offbeat.trainer.algorithms.normalization import constant_groups, sum_by_group


def leave_one_out(rewards: Tensor, group: Tensor) -> Tensor:
    """Subtract the mean of the group's other rewards; a group of one gives zero. rewards, group: [T] -> [T]"""
    values = rewards.double()
    num_others = (sum_by_group(torch.ones_like(values), group) - 1)[group]
    baseline = (sum_by_group(values, group)[group] - values) / num_others.clamp(min=1)
    return torch.where(constant_groups(rewards, group), 0.0, values - baseline).to(rewards)
