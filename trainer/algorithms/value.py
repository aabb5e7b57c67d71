"""Value loss of the critic, with the clip of OpenAI's PPO2 (arXiv:2005.12729, section 3)."""

import torch
from torch import Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = None) -> Tensor:
    """Return 0.5 (V - R)^2, or with `clip` the larger of it and the loss of V clamped to within `clip` of the old value.

    All [M] float.
    """
    loss = (values - returns).square()
    if clip is not None:
        clamped = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (clamped - returns).square())
    return 0.5 * loss
