"""Models that are asked and never trained: the reference, teachers.

Invariant: every rank makes the same calls and gets the same answers.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from trainer.engines.base import TrainEngine
from trainer.models.adapters import without_adapters
from trainer.models.divergence import Anchor
from trainer.models.packing import PackedInput
from trainer.models.policy import PackedPolicy, Sampled


class Judge(Protocol):
    """Says how likely it finds what was sampled."""

    def infer(self, batch: Sequence[PackedInput]) -> list[Tensor]:
        """Log-probabilities of the sampled tokens of every micro-batch: [M] float32 each."""
        ...


class Reference(Judge, Protocol):
    """What the policy is kept close to."""

    def anchors(self, batch: Sequence[PackedInput]) -> list[Anchor]:
        """Its distributions over the whole vocabulary, for every micro-batch."""
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

    def anchors(self, batch: Sequence[PackedInput]) -> list[Anchor]:
        """See `Reference.anchors`."""
        return [self._model.anchor(x.to(self._device)) for x in batch]

    @torch.no_grad()
    def follow(self, tensors: Iterable[tuple[str, Tensor]], share: float) -> None:
        """Move towards other weights by a share of the way; they are used up."""
        own = dict(self._model.model.named_parameters())
        for name, tensor in tensors:
            own[name].lerp_(tensor.to(own[name]), share)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by its Hugging Face name."""
        return ((name, parameter.detach()) for name, parameter in self._model.model.named_parameters())


class WithoutAdapters:
    """The policy as it was before its adapters learnt anything: a reference that takes no memory."""

    def __init__(self, engine: TrainEngine[Sampled], policy: PackedPolicy) -> None:
        self._engine = engine
        self._policy = policy

    def infer(self, batch: Sequence[PackedInput]) -> list[Tensor]:
        """See `Judge.infer`."""
        with without_adapters(self._policy):
            return self._engine.infer(batch)

    def anchors(self, batch: Sequence[PackedInput]) -> list[Anchor]:
        """See `Reference.anchors`. The weights must lie whole on every rank, as below ZeRO-3."""
        with without_adapters(self._policy):
            return [self._policy.eval().anchor(x.to(self._engine.device)) for x in batch]
