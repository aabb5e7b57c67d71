"""Tapered off-policy REINFORCE (arXiv:2503.14286)."""

import torch
from torch import Tensor

from offbeat.trainer.algorithms.ratio import TokenLosses


def tapered_policy_gradient(
    ratio: Tensor, logprobs: Tensor, advantages: Tensor, *, positive_weight: float = 1.0, negative_weight: float = 1.0
) -> TokenLosses:
    """Return -w+ A log pi for A > 0, else -w- sg(clip(r, 0, 1)) A log pi (eq. 8). All [M]."""
    ratio = ratio.detach()
    weight = torch.where(
        advantages > 0, torch.full_like(ratio, positive_weight), negative_weight * ratio.clamp(max=1.0)
    )
    return TokenLosses(-weight * advantages * logprobs, ratio, (advantages <= 0) & (ratio > 1.0))
