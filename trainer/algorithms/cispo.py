"""CISPO (MiniMax-M1, arXiv:2506.13585): clips the importance weight, but no token's gradient."""

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
    """Return -sg(clip(r, 1 - low, 1 + high)) A log pi (eq. 4 and 5).

    unified_mask: drop the tokens whose gradient PPO's clip would remove (eq. 6 and 7). All [M] float; `clipped` marks
    tokens whose weight was clipped, or that were dropped.
    """
    ratio = ratio.detach()
    low, high = max(1.0 - epsilon_low, 0.0), 1.0 + epsilon_high
    loss = -ratio.clamp(low, high) * advantages * logprobs
    if unified_mask:
        dropped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
        return TokenLosses(torch.where(dropped, torch.zeros_like(loss), loss), ratio, dropped)
    return TokenLosses(loss, ratio, (ratio > high) | (ratio < low))
