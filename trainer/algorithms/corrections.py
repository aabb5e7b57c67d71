"""Importance weights and masks for tokens of other weights or another engine.

Units: token, turn (mean), `geometric` (mean over the sequence), `sequence` (sum).
"""

from typing import Literal

import torch
from torch import Tensor

from offbeat.trainer.algorithms.ratio import bounded_exp
from offbeat.trainer.algorithms.units import mean_over, sum_over

Unit = Literal["token", "turn", "geometric", "sequence"]


def reduce_over_unit(values: Tensor, unit: Unit, turn: Tensor, sequence: Tensor) -> Tensor:
    """Return the value of each token's unit. All [M]."""
    match unit:
        case "token":
            return values
        case "turn":
            return mean_over(values, turn)
        case "geometric":
            return mean_over(values, sequence)
        case "sequence":
            return sum_over(values, sequence)


def importance_weights(log_ratio: Tensor, lower: float, upper: float) -> Tensor:
    """Return clip(pi / pi_behavior, lower, upper), detached: [M] (decoupled PPO, arXiv:2505.24298, eq. 5; TIS,
    arXiv:2510.26788).
    """
    return bounded_exp(log_ratio.detach()).clamp(lower, upper)


def within_bounds(values: Tensor, low: float | None, high: float | None) -> Tensor:
    """Return whether values are within inclusive bounds: [M] -> [M] bool."""
    mask = torch.ones_like(values, dtype=torch.bool)
    if low is not None:
        mask &= values >= low
    if high is not None:
        mask &= values <= high
    return mask


def binary_kl(logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """Return the larger KL of both directions between Bernoulli distributions of the token (KPop): [M] nats."""
    p, q = logprobs.exp(), behavior_logprobs.exp()
    log_not_p, log_not_q = _log_complement(logprobs), _log_complement(behavior_logprobs)
    forward = p * (logprobs - behavior_logprobs) + (1 - p) * (log_not_p - log_not_q)
    backward = q * (behavior_logprobs - logprobs) + (1 - q) * (log_not_q - log_not_p)
    return torch.maximum(forward, backward).clamp(min=0.0)


def _log_complement(logprobs: Tensor) -> Tensor:
    """Return log(1 - p), finite at p = 1."""
    return torch.log1p(-logprobs.exp().clamp(max=1 - 1e-6))
