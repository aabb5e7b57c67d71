"""Interface of training engines.

Invariants: methods are collective; a batch's gradient does not depend on its split into micro-batches or ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from offbeat.trainer.models.packing import PackedInput

Output = TypeVar("Output")
Output_co = TypeVar("Output_co", covariant=True)

LossFunction = Callable[[int, Output], Tensor]
"""(micro-batch index, model output) -> part of the loss; parts sum to the loss."""


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Settings of one optimizer step."""

    learning_rate: float
    weight_decay: float
    head_learning_rate: float | None = None
    head_alone: bool = False
    """Train only the value head; other weights and moments do not change."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of an optimizer step."""

    applied: bool
    """False if a non-finite gradient skipped the step."""
    grad_norm: float
    """Norm before clipping."""


class TrainEngine(Protocol[Output_co]):
    """Model and optimizer on one or more ranks."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def train(
        self, batch: Sequence[PackedInput], loss: LossFunction[Output_co], hyperparameters: Hyperparameters
    ) -> StepOutcome:
        """Run one optimizer step; `loss` receives this rank's micro-batches."""
        ...

    def infer(self, batch: Sequence[PackedInput], read: Callable[[Output_co], Tensor] | None = None) -> list[Tensor]:
        """Return `read(output)` per micro-batch, without gradients: [..., M] float32 each.

        read: the output's first tensor by default.
        """
        ...

    def tensors(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield full parameters by Hugging Face name, without a value head, each valid until the next.

        merged: merge adapters; otherwise yield them under PEFT's names.
        """
        ...

    def reset_optimizer(self) -> None:
        """Reset the moments."""
        ...

    def save(self, folder: Path) -> None:
        """Write a checkpoint that `load` resumes from exactly."""
        ...

    def load(self, folder: Path) -> None:
        """Restore a checkpoint.

        Raises:
            RuntimeError: no complete checkpoint of this module and engine.
        """
        ...
