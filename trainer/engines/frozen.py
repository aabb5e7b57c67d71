"""Models that are asked and never trained: the reference, teachers.

Invariant: every rank makes the same calls and gets the same answers.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from trainer.engines.base import TrainEngine
from trainer.models.adapters import without_adapters
from trainer.models.packing import PackedInput
from trainer.models.policy import PackedPolicy, Sampled


class Judge(Protocol):
    """Says how likely it finds what was sampled."""

    def infer(self, batch: Sequence[PackedInput]) -> list[Tensor]:
        """Log-probabilities of the sampled tokens of every micro-batch: [M] float32 each."""
        ...


class FrozenModel:
    """A model that lies whole on every rank."""

    def __init__(self, model: PackedPolicy, device: torch.device) -> None:
        self._model = model.eval().requires_grad_(False).to(device)
        self._device = device

    @torch.no_grad()
    def infer(self, batch: Sequence[PackedInput]) -> list[Tensor]:
        """See `Judge.infer`."""
        return [self._model(x.to(self._device)).logprobs for x in batch]


class WithoutAdapters:
    """The policy as it was before its adapters learnt anything: a reference that takes no memory."""

    def __init__(self, engine: TrainEngine[Sampled], policy: PackedPolicy) -> None:
        self._engine = engine
        self._policy = policy

    def infer(self, batch: Sequence[PackedInput]) -> list[Tensor]:
        """See `Judge.infer`."""
        with without_adapters(self._policy):
            return self._engine.infer(batch)
