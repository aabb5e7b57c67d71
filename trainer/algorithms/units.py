"""Differentiable sums and means over turns or sequences."""

import torch
from torch import Tensor


def sum_over(values: Tensor, unit: Tensor) -> Tensor:
    """Return each token's sum over its unit. All [M], any numbering."""
    ids, inverse = torch.unique(unit, return_inverse=True)
    return values.new_zeros(len(ids)).index_add(0, inverse, values)[inverse]


def mean_over(values: Tensor, unit: Tensor) -> Tensor:
    """Return each token's mean over its unit. All [M], any numbering."""
    return sum_over(values, unit) / sum_over(torch.ones_like(values), unit)
