"""Moments of optimizers in the host's memory."""

from collections.abc import Iterable
from typing import Any

import torch

STEP = "step"
"""Count that AdamW keeps in the host's memory."""


def move_moments(states: Iterable[dict[str, Any]], device: torch.device | str) -> None:
    for state in states:
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name != STEP:
                state[name] = value.to(device)
