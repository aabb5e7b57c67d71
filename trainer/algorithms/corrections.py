"""Corrections for tokens sampled by other weights or another engine: importance weights and masks.

`logprobs` are the learner's at the start of the step, `behavior_logprobs` the engine's. A unit is weighted or masked as
one: the token, the turn, the sequence by its mean per token (`geometric`), or by its sum (`sequence`).
"""

from typing import Literal

import torch
from torch import Tensor

from offbeat.trainer.algorithms.ratio import bounded_exp
from offbeat.trainer.algorithms.units import mean_over, sum_over

Unit = Literal["token", "turn", "geometric", "sequence"]


def reduce_over_unit(values: Tensor, unit: Unit, turn: Tensor, sequence: Tensor) -> Tensor:
    """Return each token's unit value: the mean over its turn or sequence, or the sum over its sequence.

    values: [M] float; turn, sequence: [M] int64 -> [M] float
    """
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
    """Return clip(pi / pi_behavior, lower, upper), the factor of each token's loss in decoupled PPO (arXiv:2505.24298,
    eq. 5; TIS, arXiv:2510.26788).

    [M] -> [M] float, detached
    """
    return bounded_exp(log_ratio.detach()).clamp(lower, upper)


def within_bounds(values: Tensor, low: float | None, high: float | None) -> Tensor:
    """Return a mask of the values within both inclusive bounds; None is no bound. [M] float -> [M] bool"""
    mask = torch.ones_like(values, dtype=torch.bool)
    if low is not None:
        mask &= values >= low
    if high is not None:
        mask &= values <= high
    return mask


def binary_kl(logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """Return the larger of both directions of KL between the policies' binary distributions "this token" or "another"
    (KPop).

    [M], [M] log-probabilities, at most 0 -> [M] float, nats, never negative
    """
    p, q = logprobs.exp(), behavior_logprobs.exp()
    log_not_p, log_not_q = _log_complement(logprobs), _log_complement(behavior_logprobs)
    forward = p * (logprobs - behavior_logprobs) + (1 - p) * (log_not_p - log_not_q)
    backward = q * (behavior_logprobs - logprobs) + (1 - q) * (log_not_q - log_not_p)
    return torch.maximum(forward, backward).clamp(min=0.0)


def _log_complement(logprobs: Tensor) -> Tensor:
    """Return log(1 - p), finite at p = 1."""
    return torch.log1p(-logprobs.exp().clamp(max=1 - 1e-6))
