"""The critic's loss, with the clip of OpenAI's PPO2 (arXiv:2005.12729, section 3)."""

import torch
from torch import Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = None) -> Tensor:
    """0.5 (V - R)^2, and with `clip` the larger of it and of the value kept within `clip` of the old one.

    All [M] float.
    """
    loss = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - returns).square())
    return 0.5 * loss
