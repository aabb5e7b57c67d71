"""V-trace value targets (IMPALA, arXiv:1802.01561)."""

from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.trainer.algorithms.scan import weighted_sums


class VTrace(NamedTuple):
    advantages: Tensor
    targets: Tensor


def vtrace(
    rewards: Tensor,
    values: Tensor,
    ratio: Tensor,
    last: Tensor,
    *,
    gamma: float,
    lambd: float,
    rho_bar: float,
    c_bar: float,
) -> VTrace:
    """Return targets v_t = V_t + sum_k gamma^k (c_t ... c_{t+k-1}) rho_{t+k} delta_{t+k}, rho = min(rho_bar, ratio), c
    = lambda min(c_bar, ratio) (eq. 1, remark 2).

    Advantages delta_t + gamma lambda (v_{t+1} - V_{t+1}) omit rho_t, which the loss applies
    (`train_infer_correction.is_weight`).

    All [M]; ratio = pi / pi_behavior.
    """
    following = torch.cat([values[1:], values.new_zeros(min(1, len(values)))])
    deltas = rewards + gamma * following.masked_fill(last, 0.0) - values
    rho, c = ratio.clamp(max=rho_bar), lambd * ratio.clamp(max=c_bar)
    corrections = weighted_sums(rho * deltas, gamma * c, last)
    later = torch.cat([corrections[1:], corrections.new_zeros(min(1, len(values)))]).masked_fill(last, 0.0)
    return VTrace(deltas + gamma * lambd * later, values + corrections)
