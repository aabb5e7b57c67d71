"""Probability ratios, and the result of policy losses."""

from typing import Literal, NamedTuple

from torch import Tensor

from offbeat.trainer.algorithms.units import mean_over, sum_over

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios before `exp`."""

Granularity = Literal["token", "turn", "sequence", "sequence-token", "sequence-product"]


class TokenLosses(NamedTuple):
    """Policy loss, all [M]. ratio: detached; clipped: bool, tokens with a bounded gradient or weight."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def token_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return pi / pi_old per token. [M]"""
    return bounded_exp(logprobs - old_logprobs)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), finite with its gradient."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def unit_ratio(
    granularity: Granularity, logprobs: Tensor, old_logprobs: Tensor, turn: Tensor, sequence: Tensor
) -> Tensor:
    """Return pi / pi_old of each token's unit.

    turn, sequence: geometric mean (GSPO, arXiv:2507.18071, eq. 7). sequence-token: the sequence's value with the
    token's gradient (eq. 14). sequence-product: ratio of sequence probabilities (RLOO, arXiv:2402.14740; TOPR,
    arXiv:2503.14286).

    All [M], with all tokens of each unit.
    """
    log_ratio = logprobs - old_logprobs
    match granularity:
        case "token":
            return bounded_exp(log_ratio)
        case "turn":
            return bounded_exp(mean_over(log_ratio, turn))
        case "sequence":
            return bounded_exp(mean_over(log_ratio, sequence))
        case "sequence-token":
            of_sequence = bounded_exp(mean_over(log_ratio, sequence).detach())
            return of_sequence * (log_ratio - log_ratio.detach()).exp()
        case "sequence-product":
            return bounded_exp(sum_over(log_ratio, sequence))
