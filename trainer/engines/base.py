"""Interface of training engines.

Invariants: every method but the properties is collective (each rank calls it, in the same order, with the same
arguments); the gradient of a batch does not depend on how it is split into micro-batches or sharded over ranks.
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
"""(index of the micro-batch, model output) -> its part of the batch's loss. The parts sum to the loss."""


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Settings of one optimizer step."""

    learning_rate: float
    weight_decay: float
    head_learning_rate: float | None = None
    """Learning rate of a policy's value head; None is `learning_rate`."""
    head_alone: bool = False
    """True to train only the value head; other weights and their moments do not change."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of an optimizer step."""

    applied: bool
    """False if a gradient was not finite and the step was skipped."""
    grad_norm: float
    """Gradient norm before clipping."""


class TrainEngine(Protocol[Output_co]):
    """A model and its optimizer, on one or more processes."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def train(
        self, batch: Sequence[PackedInput], loss: LossFunction[Output_co], hyperparameters: Hyperparameters
    ) -> StepOutcome:
        """Run one optimizer step; `loss` is called for this rank's micro-batches."""
        ...

    def infer(self, batch: Sequence[PackedInput], read: Callable[[Output_co], Tensor] | None = None) -> list[Tensor]:
        """Run the model without gradients and return `read(output)` per micro-batch: [..., M] float32 each.

        read: None returns the first tensor of the output.
        """
        ...

    def tensors(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield the full parameters of the Hugging Face model, by name, without a value head. A tensor is valid until
        the next.

        merged: merge adapters into the weights; otherwise yield base weights and adapters, under PEFT's file names.
        """
        ...

    def reset_optimizer(self) -> None:
        """Reset the optimizer's moments."""
        ...

    def save(self, folder: Path) -> None:
        """Write a checkpoint that `load` resumes from exactly."""
        ...

    def load(self, folder: Path) -> None:
        """Restore the state written by `save`.

        Raises:
            RuntimeError: the folder has no complete checkpoint of this module and engine.
        """
        ...
