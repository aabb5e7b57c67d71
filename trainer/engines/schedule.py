"""The learning rate as a function of the step alone, so that a resumed run needs no scheduler state."""

import math
from typing import Literal

Scheduler = Literal["constant", "linear", "cosine"]


def scheduled_rate(step: int, *, peak: float, scheduler: Scheduler, warmup_steps: int, total_steps: int) -> float:
    """The rate of optimizer batch `step` (0-based): linear warm-up, then constant, or falling to zero at `total_steps`."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if scheduler == "constant":
        return peak
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return peak * (1 - done if scheduler == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


def plateau_rate(step: int, *, peak: float, warmup_steps: int, total_steps: int, final_ratio: float) -> float:
    """Linear warm-up, constant until half of `total_steps`, then linear to `final_ratio` of the peak."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    fall = max(0.0, (step + 1) / total_steps - 0.5) * 2
    return peak * (1 - (1 - final_ratio) * min(1.0, fall))
