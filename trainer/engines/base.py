"""Interface of training engines.

Invariants: methods are collective; gradients do not depend on the split into micro-batches or ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from offbeat.trainer.models.lora import WeightForm
from offbeat.trainer.models.packing import PackedInput

Output = TypeVar("Output")
Output_co = TypeVar("Output_co", covariant=True)

LossFunction = Callable[[int, Output], Tensor]
"""(micro-batch index, output) -> summand of the loss."""


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    learning_rate: float
    weight_decay: float
    head_learning_rate: float | None = None
    head_alone: bool = False
    """Train only the value head."""


MIN_LOSS_SCALE = 1.0


@dataclass(frozen=True, slots=True)
class StepOutcome:
    applied: bool
    """False if a non-finite gradient skipped the step."""
    grad_norm: float
    """Before clipping."""
    loss_scale: float | None = None
    """With float16."""
    min_loss_scale: float = MIN_LOSS_SCALE
    """Scale below which it is not lowered: a static one's own."""

    @property
    def overflowed(self) -> bool:
        """Return whether a lower loss scale may make the gradient finite."""
        return not self.applied and self.loss_scale is not None and self.loss_scale > self.min_loss_scale


class TrainEngine(Protocol[Output_co]):
    """Model and optimizer on one or more ranks."""

    @property
    def rank(self) -> int: ...

    @property
    def data_size(self) -> int:
        """Return the number of parts of a batch: ranks, or groups of ranks."""
        ...

    @property
    def device(self) -> torch.device: ...

    def train(
        self, batch: Sequence[PackedInput], loss: LossFunction[Output_co], hyperparameters: Hyperparameters
    ) -> StepOutcome:
        """Take one step; `loss` receives this rank's micro-batches."""
        ...

    def infer(self, batch: Sequence[PackedInput], read: Callable[[Output_co], Tensor] | None = None) -> list[Tensor]:
        """Return `read(output)` (default: first tensor) per micro-batch, without gradients: [..., M] float32."""
        ...

    def tensors(self, form: WeightForm = "merged") -> Iterator[tuple[str, Tensor]]:
        """Yield full parameters and saved buffers by Hugging Face name, without a value head, each valid until the next.

        Ranks gather what is yielded, and nothing else.
        """
        ...

    def reset_optimizer(self) -> None: ...

    def offload_states(self) -> None:
        """Move weights and moments to the host's memory; nothing but `load_states` may follow."""
        ...

    def load_states(self) -> None:
        """Move weights and moments back."""
        ...

    def close(self) -> None:
        """Free weights and moments, of a module without other references; nothing may follow."""
        ...

    def save(self, folder: Path) -> None:
        """Write a checkpoint that `load` resumes exactly."""
        ...

    def load(self, folder: Path) -> None:
        """Restore a checkpoint.

        Raises:
            RuntimeError: no complete checkpoint of this module and engine.
        """
        ...
