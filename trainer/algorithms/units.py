"""Means and sums over the tokens of a turn or of a sequence, given back to each of its tokens."""

import torch
from torch import Tensor


def sum_over(values: Tensor, unit: Tensor) -> Tensor:
    """Each token gets its unit's sum.

    values: [M] float; unit: [M] int64, any numbering -> [M] float, differentiable
    """
    ids, inverse = torch.unique(unit, return_inverse=True)
    return values.new_zeros(len(ids)).index_add(0, inverse, values)[inverse]


def mean_over(values: Tensor, unit: Tensor) -> Tensor:
    """Each token gets its unit's mean.

    values: [M] float; unit: [M] int64, any numbering -> [M] float, differentiable
    """
    return sum_over(values, unit) / sum_over(torch.ones_like(values), unit)
