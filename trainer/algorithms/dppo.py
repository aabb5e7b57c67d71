"""Divergence PPO with total variation (DPPO, arXiv:2602.04879), with prime-rl's quadratic pull (Kimi)."""

import torch
from torch import Tensor

from offbeat.trainer.algorithms.ratio import TokenLosses, token_ratio


def divergence_masked_surrogate(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, *, mask_low: float, mask_high: float, kl_tau: float
) -> TokenLosses:
    """Return -m A pi/mu + kl_tau (log pi - log mu)^2, where m drops pi - mu > high for A > 0 and pi - mu < -low for A <
    0.

    All [M], bounds in probability.
    """
    ratio = token_ratio(logprobs, behavior_logprobs)
    change = (logprobs.exp() - behavior_logprobs.exp()).detach()
    dropped = ((advantages > 0) & (change > mask_high)) | ((advantages < 0) & (change < -mask_low))
    surrogate = torch.where(dropped, torch.zeros_like(ratio), -ratio * advantages)
    return TokenLosses(surrogate + kl_tau * (logprobs - behavior_logprobs).square(), ratio.detach(), dropped)
