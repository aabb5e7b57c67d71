"""CISPO (MiniMax-M1, arXiv:2506.13585): clipped importance weights."""

import torch
from torch import Tensor

from offbeat.trainer.algorithms.ratio import TokenLosses


def clipped_weight_policy_gradient(
    ratio: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
    unified_mask: bool = False,
) -> TokenLosses:
    """Return -sg(clip(r, 1 - low, 1 + high)) A log pi (eq. 4, 5). All [M].

    unified_mask: drop tokens without a gradient in PPO (eq. 6, 7).
    """
    ratio = ratio.detach()
    low, high = max(1.0 - epsilon_low, 0.0), 1.0 + epsilon_high
    loss = -ratio.clamp(low, high) * advantages * logprobs
    if unified_mask:
        dropped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
        return TokenLosses(torch.where(dropped, torch.zeros_like(loss), loss), ratio, dropped)
    return TokenLosses(loss, ratio, (ratio > high) | (ratio < low))
