"""Discounted sums per trajectory, in log2(longest trajectory) passes."""

import torch
from torch import Tensor


def discounted_sums(values: Tensor, last: Tensor, decay: float) -> Tensor:
    """Return S_t = x_t + decay * S_{t+1} within each trajectory. All [M].

    Raises:
        ValueError: the final token ends no trajectory.
    """
    if not len(values):
        return values.clone()
    if not bool(last[-1]):
        raise ValueError("the final token must be the last of its trajectory")
    indexes = torch.arange(len(values), device=values.device)
    ends = indexes[last]
    remaining = ends[torch.searchsorted(ends, indexes)] - indexes
    sums, stride = values.clone(), 1
    while stride <= int(remaining.max()):
        ahead = torch.where(remaining[:-stride] >= stride, sums[stride:], torch.zeros_like(sums[stride:]))
        sums = torch.cat([sums[:-stride] + decay**stride * ahead, sums[-stride:]])
        stride *= 2
    return sums


def weighted_sums(values: Tensor, decays: Tensor, last: Tensor) -> Tensor:
    """Return S_t = x_t + d_t S_{t+1} within each trajectory. All [M].

    Raises:
        ValueError: the final token ends no trajectory.
    """
    if not len(values):
        return values.clone()
    if not bool(last[-1]):
        raise ValueError("the final token must be the last of its trajectory")
    sums, products, stride = values.clone(), decays.masked_fill(last, 0.0), 1
    while stride < len(values) and bool(products.any()):
        ahead, further = torch.zeros_like(sums), torch.zeros_like(products)
        ahead[:-stride], further[:-stride] = sums[stride:], products[stride:]
        sums, products = sums + products * ahead, products * further
        stride *= 2
    return sums
