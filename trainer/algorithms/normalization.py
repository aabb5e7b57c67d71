"""Making rewards and advantages comparable."""

import torch
from torch import Tensor

EPS = 1e-6


def normalize_by_group(rewards: Tensor, group: Tensor, *, center: bool = True, scale: bool = False) -> Tensor:
    """Center each reward on its group's mean (GRPO, arXiv:2402.03300; without `scale` Dr. GRPO, arXiv:2503.20783) and divide
    by the group's unbiased standard deviation.

    A group of one, and with `scale` a group whose members are equal, gives zeros.

    rewards: [T] float; group: [T] int64, 0-based -> [T] float
    """
    if not len(rewards) or not center:
        return rewards.clone()
    size = torch.bincount(group).to(rewards.dtype)
    mean = torch.zeros_like(size).index_add_(0, group, rewards) / size.clamp(min=1)
    centered = rewards - mean[group]
    centered = torch.where(size[group] > 1, centered, torch.zeros_like(centered))
    if not scale:
        return centered
    variance = torch.zeros_like(size).index_add_(0, group, centered.square()) / (size - 1).clamp(min=1)
    std = variance.sqrt()[group]
    return torch.where(std > EPS, centered / (std + EPS), torch.zeros_like(centered))


def whiten(values: Tensor) -> Tensor:
    """Zero mean and unit standard deviation (unbiased) over all of [M]; fewer than two values stay as they are."""
    if len(values) < 2:
        return values
    return (values - values.mean()) / (values.std() + EPS)


def has_signal(rewards: Tensor) -> bool:
    """Whether the members of one group did not all get the same reward; rewards: [G] float."""
    return len(rewards) > 1 and bool((rewards - rewards[0]).abs().max() > EPS)
