"""Generalized advantage estimation (arXiv:1506.02438)."""

import torch
from torch import Tensor

from offbeat.trainer.algorithms.scan import discounted_sums


def generalized_advantages(rewards: Tensor, values: Tensor, last: Tensor, gamma: float, lambd: float) -> Tensor:
    """Return A_t = delta_t + gamma * lambda * A_{t+1}, delta_t = r_t + gamma * V_{t+1} - V_t (eq. 16).

    V is 0 after a trajectory; to bootstrap, add gamma times the later value to its last reward. All [M].
    """
    following = torch.cat([values[1:], values.new_zeros(min(1, len(values)))])
    deltas = rewards + gamma * following.masked_fill(last, 0.0) - values
    return discounted_sums(deltas, last, gamma * lambd)
