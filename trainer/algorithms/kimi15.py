"""Kimi k1.5's online mirror descent (arXiv:2501.12599, eq. 3)."""

import torch
from torch import Tensor

from offbeat.trainer.algorithms.ratio import TokenLosses


def mirror_descent(
    ratio: Tensor, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, tau: float
) -> TokenLosses:
    """Return -A log pi + tau / 2 (log pi - log pi_old)^2, regularized per token as in ROLL. All [M]."""
    penalty = 0.5 * tau * (logprobs - old_logprobs).square()
    return TokenLosses(-advantages * logprobs + penalty, ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))
