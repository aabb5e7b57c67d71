"""Models that are asked and never trained: the reference, teachers.

Invariant: every rank makes the same calls and gets the same answers.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from offbeat.trainer.engines.base import TrainEngine
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.engines.rank_passes import OnRanks
from offbeat.trainer.models.divergence import ReferenceStates
from offbeat.trainer.models.lora import without_adapters
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.policy import PackedPolicy, Sampled


class LogprobModel(Protocol):
    """Says how likely it finds what was sampled."""

    def infer(self, batch: Sequence[PackedInput]) -> list[Tensor]:
        """Log-probabilities of the sampled tokens of every micro-batch: [M] float32 each."""
        ...


@runtime_checkable
class Reference(LogprobModel, Protocol):
    """What the policy may be kept close to over the whole vocabulary."""

    def anchors(self, batch: Sequence[PackedInput]) -> list[ReferenceStates]:
        """Its distributions over the whole vocabulary, for every micro-batch."""
        ...


class FrozenModel(OnRanks):
    """`hf_infer`: a plain transformers model that lies whole on every rank, each of which computes a share of a batch."""

    def __init__(self, model: PackedPolicy, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._model = model.eval().requires_grad_(False).to(ranks.device)

    @torch.no_grad()
    def infer(self, batch: Sequence[PackedInput]) -> list[Tensor]:
        return self.outputs(self._model, batch)

    def anchors(self, batch: Sequence[PackedInput]) -> list[ReferenceStates]:
        """See `Reference.anchors`; each rank computes all of them."""
        return [self._model.anchor(x.to(self.device)) for x in batch]

    @torch.no_grad()
    def follow(self, tensors: Iterable[tuple[str, Tensor]], share: float) -> None:
        """Move towards other weights by a share of the way; they are used up."""
        own = dict(self._model.model.named_parameters())
        for name, tensor in tensors:
            own[name].lerp_(tensor.to(own[name]), share)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by its Hugging Face name."""
        return ((name, parameter.detach()) for name, parameter in self._model.model.named_parameters())


class AdapterFreeReference:
    """The policy as it was before its adapters learnt anything: a reference that takes no memory."""

    def __init__(self, engine: TrainEngine[Sampled], policy: PackedPolicy) -> None:
        self._engine = engine
        self._policy = policy

    def infer(self, batch: Sequence[PackedInput]) -> list[Tensor]:
        with without_adapters(self._policy):
            return self._engine.infer(batch)

    def anchors(self, batch: Sequence[PackedInput]) -> list[ReferenceStates]:
        """See `Reference.anchors`. The weights must lie whole on every rank, as below ZeRO-3."""
        with without_adapters(self._policy):
            return [self._policy.eval().anchor(x.to(self._engine.device)) for x in batch]
