"""Corrections for tokens that other weights, or another engine, sampled."""

from torch import Tensor

from trainer.algorithms.ratio import ratio_of


def truncated_importance_weights(old_logprobs: Tensor, behavior_logprobs: Tensor, cap: float) -> Tensor:
    """min(pi_old / pi_behavior, cap): what decoupled PPO multiplies each token's loss with (arXiv:2505.24298, eq. 5).

    [M], [M] -> [M] float, detached
    """
    return ratio_of(old_logprobs, behavior_logprobs).clamp(max=cap).detach()
