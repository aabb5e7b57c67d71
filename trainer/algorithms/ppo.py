"""PPO (arXiv:1707.06347) with separate bounds (DAPO, arXiv:2503.14476) and dual clip (arXiv:1912.09729)."""

import torch
from torch import Tensor

from offbeat.trainer.algorithms.ratio import TokenLosses


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLosses:
    """Return -min(r A, clip(r, 1 - low, 1 + high) A), for A < 0 at most -`dual_clip` A. All [M]."""
    plain = -ratio * advantages
    bounded = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        beyond = (advantages < 0) & (loss > ceiling)
        loss = torch.where(beyond, ceiling, loss)
        clipped = clipped | beyond
    return TokenLosses(loss, ratio.detach(), clipped.detach())
