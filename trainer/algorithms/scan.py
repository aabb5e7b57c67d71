"""Discounted sums towards the end of each trajectory, vectorized over all trajectories."""

import torch
from torch import Tensor


def discounted_sums(values: Tensor, last: Tensor, decay: float) -> Tensor:
    """Return S_t = x_t + decay * S_{t+1}, restarted at each trajectory's end.

    The reach doubles with each pass, so log2(longest trajectory) passes replace a loop over tokens.

    values: [M] float; last: [M] bool, the last token of each trajectory -> [M] float

    Raises:
        ValueError: the final token ends no trajectory.
    """
    if not len(values):
        return values.clone()
    if not bool(last[-1]):
        raise ValueError("the final token must be the last of its trajectory")
    places = torch.arange(len(values), device=values.device)
    ends = places[last]
    remaining = ends[torch.searchsorted(ends, places)] - places
    sums, reach = values.clone(), 1
    while reach <= int(remaining.max()):
        ahead = torch.where(remaining[:-reach] >= reach, sums[reach:], torch.zeros_like(sums[reach:]))
        sums = torch.cat([sums[:-reach] + decay**reach * ahead, sums[-reach:]])
        reach *= 2
    return sums


def weighted_sums(values: Tensor, decays: Tensor, last: Tensor) -> Tensor:
    """Return S_t = x_t + d_t S_{t+1}, restarted at each trajectory's end: `discounted_sums` with a decay per token.

    values, decays: [M] float; last: [M] bool -> [M] float

    Raises:
        ValueError: the final token ends no trajectory.
    """
    if not len(values):
        return values.clone()
    if not bool(last[-1]):
        raise ValueError("the final token must be the last of its trajectory")
    sums, products, reach = values.clone(), decays.masked_fill(last, 0.0), 1
    while reach < len(values) and bool(products.any()):
        ahead, further = torch.zeros_like(sums), torch.zeros_like(products)
        ahead[:-reach], further[:-reach] = sums[reach:], products[reach:]
        sums, products = sums + products * ahead, products * further
        reach *= 2
    return sums
