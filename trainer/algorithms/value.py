"""Value loss, clipped as in PPO2 (arXiv:2005.12729, section 3)."""

import torch
from torch import Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = None) -> Tensor:
    """Return 0.5 (V - R)^2, with `clip` at least that of V clamped around its old value. All [M]."""
    loss = (values - returns).square()
    if clip is not None:
        clamped = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (clamped - returns).square())
    return 0.5 * loss
