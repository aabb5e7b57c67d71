"""Truncated importance sampling (IMPALA's rho, arXiv:1802.01561)."""

from torch import Tensor

from offbeat.trainer.algorithms.ratio import TokenLosses


def truncated_importance_sampling(
    ratio: Tensor, logprobs: Tensor, advantages: Tensor, *, upper_bound: float, lower_bound: float = 0.0
) -> TokenLosses:
    """Return -sg(clip(r, lower, upper)) A log pi. All [M]."""
    ratio = ratio.detach()
    loss = -ratio.clamp(lower_bound, upper_bound) * advantages * logprobs
    return TokenLosses(loss, ratio, (ratio > upper_bound) | (ratio < lower_bound))
