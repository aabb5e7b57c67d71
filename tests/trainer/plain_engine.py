"""A training engine without DeepSpeed, for tests of what uses one."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.trainer.config.actor_train import TrainingArgs
from offbeat.trainer.engines.base import Hyperparameters, LossFunction, StepOutcome
from offbeat.trainer.engines.param_groups import adopt, forget, parameter_groups
from offbeat.trainer.models.lora import WeightForm, exported_weights
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.value_head import HEAD


class PlainEngine:
    """AdamW on one module, in this process."""

    rank, data_size, device = 0, 1, torch.device("cpu")

    def __init__(self, module: nn.Module) -> None:
        torch.set_num_threads(1)
        self.module = module
        groups = parameter_groups(module, TrainingArgs())
        self.kinds = tuple(groups)
        self.optimizer = torch.optim.AdamW(
            [{"params": group} for group in groups.values()], betas=(0.9, 0.95), eps=1e-3
        )
        self.resets = 0
        self.rates: list[float] = []
        self.seen: list[list[PackedInput]] = []

    def train(
        self, batch: Sequence[PackedInput], loss: LossFunction[Any], hyperparameters: Hyperparameters
    ) -> StepOutcome:
        """One clipped step, unless a gradient is not finite."""
        self.rates.append(hyperparameters.learning_rate)
        self.seen.append(list(batch))
        adopt(self.optimizer.param_groups, self.kinds, hyperparameters)
        self.optimizer.zero_grad()
        sum((loss(i, self.module(x)) for i, x in enumerate(batch)), start=torch.zeros(())).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0))
        if not math.isfinite(norm):
            return StepOutcome(False, norm)
        self.optimizer.step()
        if hyperparameters.head_alone:
            forget(self.optimizer.state[parameter] for parameter in self.optimizer.param_groups[0]["params"])
        return StepOutcome(True, norm)

    @torch.no_grad()
    def infer(self, batch: Sequence[PackedInput], read: Callable[[Any], Tensor] | None = None) -> list[Tensor]:
        """What `read` takes of each micro-batch, or the first output."""
        outputs = [self.module(x) for x in batch]
        if read is not None:
            return [read(output) for output in outputs]
        return [output[0] if isinstance(output, tuple) else output for output in outputs]

    def tensors(self, form: WeightForm = "merged") -> Iterator[tuple[str, Tensor]]:
        for whole in exported_weights(self.module, form, "model."):
            if not whole.name.startswith(HEAD):
                yield whole.name.removeprefix("model."), whole.tensor()

    def reset_optimizer(self) -> None:
        """Counts."""
        self.resets += 1

    def save(self, folder: Path) -> None:
        raise NotImplementedError

    def load(self, folder: Path) -> None:
        raise NotImplementedError
