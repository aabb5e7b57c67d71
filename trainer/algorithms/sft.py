"""Supervised fine-tuning: negative log-likelihood of given tokens."""

from torch import Tensor


def negative_log_likelihood(logprobs: Tensor, count: int) -> Tensor:
    """Return a micro-batch's share of the mean over `count` tokens. logprobs: [m]"""
    return -logprobs.sum() / count
