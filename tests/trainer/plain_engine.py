"""A training engine without DeepSpeed, for tests of what uses one."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.engines.base import Hyperparameters, LossFunction, StepOutcome
from trainer.models.adapters import whole_weights
from trainer.models.packing import PackedInput


class PlainEngine:
    """AdamW on one module, in this process."""

    rank, world_size, device = 0, 1, torch.device("cpu")

    def __init__(self, module: nn.Module) -> None:
        torch.set_num_threads(1)
        self.module = module
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), eps=1e-3)
        self.resets = 0
        self.rates: list[float] = []
        self.seen: list[list[PackedInput]] = []

    def train(
        self, batch: Sequence[PackedInput], loss: LossFunction[Any], hyperparameters: Hyperparameters
    ) -> StepOutcome:
        """One clipped step, unless a gradient is not finite."""
        self.rates.append(hyperparameters.learning_rate)
        self.seen.append(list(batch))
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = hyperparameters.learning_rate, hyperparameters.weight_decay
        self.optimizer.zero_grad()
        sum((loss(i, self.module(x)) for i, x in enumerate(batch)), start=torch.zeros(())).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0))
        if not math.isfinite(norm):
            return StepOutcome(False, norm)
        self.optimizer.step()
        return StepOutcome(True, norm)

    @torch.no_grad()
    def infer(self, batch: Sequence[PackedInput]) -> list[Tensor]:
        """The first output of each micro-batch."""
        outputs = [self.module(x) for x in batch]
        return [output[0] if isinstance(output, tuple) else output for output in outputs]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, adapters merged."""
        return ((whole.name.removeprefix("model."), whole.tensor()) for whole in whole_weights(self.module))

    def reset_optimizer(self) -> None:
        """Counts."""
        self.resets += 1

    def save(self, folder: Path) -> None:
        raise NotImplementedError

    def load(self, folder: Path) -> None:
        raise NotImplementedError
