"""Truncated importance sampling (IMPALA's rho, arXiv:1802.01561; AIPO, arXiv:2505.24034)."""

from torch import Tensor

from trainer.algorithms.ratio import TokenLosses, ratio_of


def truncated_importance_sampling(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, upper_bound: float
) -> TokenLosses:
    """-sg(min(r, c)) A log pi: every token keeps a gradient, however far the policy has moved.

    All [M] float; `clipped` marks tokens whose weight was cut to c.
    """
    ratio = ratio_of(logprobs, old_logprobs).detach()
    loss = -ratio.clamp(max=upper_bound) * advantages * logprobs
    return TokenLosses(loss, ratio, ratio > upper_bound)
