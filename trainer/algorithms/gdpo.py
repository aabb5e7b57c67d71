"""Decoupled normalization of several rewards (GDPO, arXiv:2601.05242)."""

import torch
from torch import Tensor

from offbeat.trainer.algorithms.normalization import EPS, normalize_by_group


def decoupled_sum(parts: Tensor, weights: Tensor, group: Tensor, *, scale: bool = True) -> Tensor:
    """Normalize each reward within its group, then add them by weight.

    A reward that is missing (NaN), equal in the group or of a group's only episode adds 0, so that sums are 0 on average
    within each group. parts: [T, K]; weights: [K]; group: [T] -> [T] float64
    """
    total = torch.zeros(len(parts), dtype=torch.float64)
    for values, weight in zip(parts.double().T, weights.tolist(), strict=True):
        given = ~values.isnan()
        total[given] += weight * normalize_by_group(values[given], group[given], scale=scale)
    return total


def batch_normalized(sums: Tensor, num_masked: int = 0) -> Tensor:
    """Divide by the batch's unbiased deviation around 0, the mean of sums of every group; 0 if there is none.

    num_masked: further episodes, whose sums are 0. sums: [T] -> [T]
    """
    deviation = (sums.square().sum() / max(1, len(sums) + num_masked - 1)).sqrt()
    return sums / (deviation + EPS) if deviation > EPS else torch.zeros_like(sums)
