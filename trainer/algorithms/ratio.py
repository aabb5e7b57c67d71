"""Probability ratios, and what every policy loss returns."""

from typing import NamedTuple

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped here before they are exponentiated: e^20 is far outside every trust region."""


class TokenLosses(NamedTuple):
    """loss: [M] float; ratio: [M] float, detached; clipped: [M] bool, tokens whose gradient was taken away or cut."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def ratio_of(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """pi / pi_old per token. [M], [M] -> [M]"""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
