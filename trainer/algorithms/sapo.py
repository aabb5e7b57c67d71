"""Soft adaptive policy optimization (arXiv:2511.20347)."""

import torch
from torch import Tensor

from offbeat.trainer.algorithms.ratio import TokenLosses


def soft_gated_surrogate(
    ratio: Tensor, advantages: Tensor, *, temperature_pos: float, temperature_neg: float
) -> TokenLosses:
    """Return -A f(r), f(r) = 4 / t * sigmoid(t (r - 1)), t by the sign of A. All [M]."""
    positive = torch.full_like(ratio, temperature_pos)
    t = torch.where(advantages > 0, positive, torch.full_like(ratio, temperature_neg))
    gate = torch.sigmoid(t * (ratio - 1.0)) * 4.0 / t
    return TokenLosses(-advantages * gate, ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))
