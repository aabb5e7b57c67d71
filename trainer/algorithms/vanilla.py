"""REINFORCE's loss (Williams 1992)."""

import torch
from torch import Tensor

from offbeat.trainer.algorithms.ratio import TokenLosses


def policy_gradient(ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> TokenLosses:
    """Return -A log pi. All [M]."""
    return TokenLosses(-advantages * logprobs, ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))
