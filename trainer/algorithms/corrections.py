"""Corrections for tokens that other weights, or another engine, sampled: weights, and masks where no weight would do.

`logprobs` are the learner's of the policy that a step starts from, `behavior_logprobs` the engine's. A unit is what is
judged as one: the token, the turn, the sequence by its mean per token (`geometric`), or as a whole (`sequence`).
"""

from typing import Literal

import torch
from torch import Tensor

from offbeat.trainer.algorithms.ratio import bounded_exp
from offbeat.trainer.algorithms.units import mean_over, sum_over

Unit = Literal["token", "turn", "geometric", "sequence"]


def over_unit(values: Tensor, unit: Unit, turn: Tensor, sequence: Tensor) -> Tensor:
    """Each token gets its unit's value: mean over turn or sequence, sum over the sequence as a whole.

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
    """clip(pi / pi_behavior, lower, upper) from its log: what decoupled PPO multiplies each token's loss with
    (arXiv:2505.24298, eq. 5; TIS, arXiv:2510.26788).

    [M] -> [M] float, detached
    """
    return bounded_exp(log_ratio.detach()).clamp(lower, upper)


def inside(values: Tensor, low: float | None, high: float | None) -> Tensor:
    """Whether each value is within both bounds, those included; None is no bound. [M] float -> [M] bool"""
    kept = torch.ones_like(values, dtype=torch.bool)
    if low is not None:
        kept &= values >= low
    if high is not None:
        kept &= values <= high
    return kept


def binary_kl(logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """The larger of the two divergences between "this token" and "any other" under both policies (KPop).

    [M], [M] log-probabilities, at most 0 -> [M] float, nats, never negative
    """
    p, q = logprobs.exp(), behavior_logprobs.exp()
    others_p, others_q = _log_of_others(logprobs), _log_of_others(behavior_logprobs)
    forward = p * (logprobs - behavior_logprobs) + (1 - p) * (others_p - others_q)
    backward = q * (behavior_logprobs - logprobs) + (1 - q) * (others_q - others_p)
    return torch.maximum(forward, backward).clamp(min=0.0)


def _log_of_others(logprobs: Tensor) -> Tensor:
    """log(1 - p), finite at p = 1."""
    return torch.log1p(-logprobs.exp().clamp(max=1 - 1e-6))
