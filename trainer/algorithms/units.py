"""Sums and means over turns or sequences, broadcast back to their tokens."""

import torch
from torch import Tensor


def sum_over(values: Tensor, unit: Tensor) -> Tensor:
    """Return the sum over each token's unit.

    values: [M] float; unit: [M] int64, any numbering -> [M] float, differentiable
    """
    ids, inverse = torch.unique(unit, return_inverse=True)
    return values.new_zeros(len(ids)).index_add(0, inverse, values)[inverse]


def mean_over(values: Tensor, unit: Tensor) -> Tensor:
    """Return the mean over each token's unit.

    values: [M] float; unit: [M] int64, any numbering -> [M] float, differentiable
    """
    return sum_over(values, unit) / sum_over(torch.ones_like(values), unit)
