# pyright: basic
"""AdamW, with moments in float32 or in 8 bits."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from offbeat.trainer.config.actor_train import TrainingArgs
from offbeat.trainer.engines.param_groups import adam_settings
from offbeat.trainer.models.quantization import silence_bitsandbytes


class Clipping:
    """Step of an optimizer that clips by the global norm and skips non-finite gradients, as ZeRO's."""

    overflow = False
    _global_grad_norm = math.nan
    param_groups: list[dict[str, Any]]

    def __init__(self, params: Any, max_grad_norm: float, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)  # pyright: ignore[reportCallIssue]
        self._max_grad_norm = max_grad_norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        self._global_grad_norm = float(norm)
        self.overflow = not math.isfinite(self._global_grad_norm)
        if not self.overflow:
            torch.nn.utils.clip_grads_with_norm_(parameters, self._max_grad_norm, norm)
            super().step(closure)  # pyright: ignore[reportAttributeAccessIssue]


class ClippingAdamW(Clipping, torch.optim.AdamW): ...


def make_adamw(groups: Sequence[list[nn.Parameter]], training: TrainingArgs, *, clips: bool) -> torch.optim.Optimizer:
    parameters = [{"params": group} for group in groups]
    settings: dict[str, Any] = {
        "lr": training.learning_rate,
        "weight_decay": training.weight_decay,
        **adam_settings(training),
    }
    if clips:
        settings["max_grad_norm"] = training.max_grad_norm
    if training.optim == "adamw_8bit":
        silence_bitsandbytes()
        from bitsandbytes.optim.adamw import AdamW8bit  # of an extra  # noqa: PLC0415

        kind = type("ClippingAdamW8bit", (Clipping, AdamW8bit), {}) if clips else AdamW8bit
        return kind(parameters, **settings)
    return (ClippingAdamW if clips else torch.optim.AdamW)(parameters, fused=True, **settings)
