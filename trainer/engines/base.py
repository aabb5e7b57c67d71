"""What the learner asks of a training engine.

Invariants: every method but the properties is collective (each rank calls it, in the same order, with the same
arguments); the gradient of a batch does not depend on how it is cut into micro-batches or spread over ranks.
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
"""(index of the micro-batch, what the model said of it) -> its share of the batch's loss: the shares add up to the loss."""


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """What may change from one optimizer step to the next."""

    learning_rate: float
    weight_decay: float
    head_learning_rate: float | None = None
    """Of a policy's value head; None for the same."""
    head_alone: bool = False
    """The value head learns; the other weights and their moments stay as they are."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What an optimizer step did."""

    applied: bool
    """False when a gradient was not finite: nothing changed."""
    grad_norm: float
    """Before clipping."""


class TrainEngine(Protocol[Output_co]):
    """A model with its optimizer, on one process or many."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def train(
        self, batch: Sequence[PackedInput], loss: LossFunction[Output_co], hyperparameters: Hyperparameters
    ) -> StepOutcome:
        """One optimizer step; `loss` is called for the micro-batches that fall to this rank."""
        ...

    def infer(self, batch: Sequence[PackedInput], read: Callable[[Output_co], Tensor] | None = None) -> list[Tensor]:
        """What `read` takes of the model's output for every micro-batch, without gradients: [..., M] float32 each.

        read: None for the first tensor of the output.
        """
        ...

    def tensors(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of the Hugging Face model once, whole, by its name; use each before asking for the next. A value
        head is none of them.

        merged: with adapters in the weights that they change; otherwise they come apart, by the names of PEFT's files.
        """
        ...

    def reset_optimizer(self) -> None:
        """Forget the optimizer's moments."""
        ...

    def save(self, folder: Path) -> None:
        """Write what `load` needs to go on exactly here."""
        ...

    def load(self, folder: Path) -> None:
        """Go on where `save` was called."""
        ...
