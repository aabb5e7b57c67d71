"""V-trace: off-policy value targets for a critic (IMPALA, arXiv:1802.01561)."""

from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.trainer.algorithms.scan import weighted_sums


class VTrace(NamedTuple):
    """Result of `vtrace`. advantages, targets: [M] float."""

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
    """Return targets v_t = V_t + sum_k gamma^k (c_t ... c_{t+k-1}) rho_{t+k} delta_{t+k} with rho = min(rho_bar, ratio) and
    c = lambda min(c_bar, ratio) (eq. 1 and remark 2).

    The advantage is delta_t + gamma lambda (v_{t+1} - V_{t+1}): the loss applies the first step's own ratio. With ratio 1
    it equals GAE.

    rewards, values, ratio: [M] float, ratio = pi / pi_behavior; last: [M] bool
    """
    following = torch.cat([values[1:], values.new_zeros(min(1, len(values)))])
    deltas = rewards + gamma * following.masked_fill(last, 0.0) - values
    rho, c = ratio.clamp(max=rho_bar), lambd * ratio.clamp(max=c_bar)
    corrections = weighted_sums(rho * deltas, gamma * c, last)
    later = torch.cat([corrections[1:], corrections.new_zeros(min(1, len(values)))]).masked_fill(last, 0.0)
    return VTrace(deltas + gamma * lambd * later, values + corrections)
