"""Asynchronous importance-weighted policy optimization (LlamaRL, arXiv:2505.24034)."""

from torch import Tensor

from offbeat.trainer.algorithms.ratio import TokenLosses, token_ratio


def one_sided_policy_gradient(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, *, rho: float
) -> TokenLosses:
    """Return -sg(min(pi / mu, rho)) A log pi, mu the behavior policy. All [M]."""
    ratio = token_ratio(logprobs, behavior_logprobs).detach()
    return TokenLosses(-ratio.clamp(max=rho) * advantages * logprobs, ratio, ratio > rho)
