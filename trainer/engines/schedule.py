"""Stateless learning rate by step."""

import json
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import cast

import torch
from pydantic import JsonValue
from torch.optim.lr_scheduler import LambdaLR

from offbeat.trainer.config.schedule import LRScheduler


def scheduled_rate(
    step: int,
    *,
    peak: float,
    scheduler: LRScheduler,
    warmup_steps: int,
    total_steps: int,
    settings: Mapping[str, JsonValue] | None = None,
) -> float:
    """Return the rate of `step` (0-based): linear warm-up, then transformers' schedule.

    settings: see `KWARGS`.

    Raises:
        ValueError: the schedule rejects a setting.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if scheduler.startswith("constant") or not peak:
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if scheduler == "linear":
        return peak * (1 - progress)
    if scheduler == "cosine" and not settings:
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    return peak * _factor(scheduler, json.dumps(dict(settings or {})), peak, warmup_steps, total_steps)(step)


@lru_cache(maxsize=8)
def _factor(name: str, settings: str, peak: float, warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    from transformers import get_scheduler  # noqa: PLC0415

    schedule = get_scheduler(  # a LambdaLR for every schedule in KWARGS
        name,
        torch.optim.SGD([torch.zeros(1)], lr=peak),
        num_warmup_steps=warmup_steps,
        num_training_steps=total_steps,
        scheduler_specific_kwargs=json.loads(settings),
    )
    return cast(LambdaLR, schedule).lr_lambdas[0]


def plateau_rate(step: int, *, peak: float, warmup_steps: int, total_steps: int, final_ratio: float) -> float:
    """Return linear warm-up, constant until half of `total_steps`, linear to `final_ratio` of the peak."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    decay = max(0.0, (step + 1) / total_steps - 0.5) * 2
    return peak * (1 - (1 - final_ratio) * min(1.0, decay))
