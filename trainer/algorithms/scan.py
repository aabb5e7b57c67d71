"""Discounted sums towards the end of each trajectory, over all trajectories at once."""

import torch
from torch import Tensor


def discounted_sums(values: Tensor, last: Tensor, decay: float) -> Tensor:
    """S_t = x_t + decay * S_{t+1}, starting anew at each trajectory's end.

    Doubles its reach in each pass, so it takes log2(longest trajectory) passes rather than one step per token.

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
