"""Frozen models: reference and teachers."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from offbeat.trainer.engines.base import TrainEngine
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.engines.rank_passes import OnRanks
from offbeat.trainer.models.divergence import ReferenceStates
from offbeat.trainer.models.initial_adapter import with_initial_adapters
from offbeat.trainer.models.lora import named_weights
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.policy import PackedPolicy, Sampled


class LogprobModel(Protocol):
    def infer(self, batch: Sequence[PackedInput]) -> list[Tensor]:
        """Return logprobs: [M] float32 per micro-batch."""
        ...


@runtime_checkable
class Reference(LogprobModel, Protocol):
    def hidden_states(self, batch: Sequence[PackedInput]) -> list[ReferenceStates]: ...


@runtime_checkable
class MovableModel(LogprobModel, Protocol):
    """Model that can leave the devices."""

    def offload_states(self) -> None: ...

    def load_states(self) -> None: ...


class FrozenModel(OnRanks):
    """`hf_infer`: a whole transformers model on every rank."""

    def __init__(self, model: PackedPolicy, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._model = model.eval().requires_grad_(False).to(ranks.device)
        self._masters: dict[str, Tensor] = {}
        """Float32 copies of 16-bit parameters that moved by a share, in the memory of the CPU."""

    @torch.no_grad()
    def infer(self, batch: Sequence[PackedInput]) -> list[Tensor]:
        return self.outputs(self._model, batch)

    def hidden_states(self, batch: Sequence[PackedInput]) -> list[ReferenceStates]:
        return [self._model.hidden_states(x.to(self.device)) for x in batch]

    def offload_states(self) -> None:
        self._model.to("cpu")

    def load_states(self) -> None:
        self._model.to(self.device)

    @torch.no_grad()
    def follow(self, tensors: Iterable[tuple[str, Tensor]], share: float) -> None:
        """Interpolate towards `tensors` by `share`, 16-bit parameters in float32: they round small changes away."""
        own = dict(named_weights(self._model.model))
        for name, tensor in tensors:
            parameter = own[name]
            if not parameter.is_floating_point():
                continue
            if parameter.itemsize < 4 and (share < 1 or tensor.itemsize == 4) and name not in self._masters:
                self._masters[name] = parameter.float().cpu()
            moved = self._masters.get(name, parameter)
            moved.lerp_(tensor.to(moved), share)
            if moved is not parameter:
                parameter.copy_(moved)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield weights, as exactly as they are known."""
        for name, parameter in named_weights(self._model.model):
            yield name, self._masters.get(name, parameter.detach())


class FirstPolicyReference:
    """Policy with the adapters that it started from, or with none."""

    def __init__(self, engine: TrainEngine[Sampled], policy: PackedPolicy) -> None:
        self._engine = engine
        self._policy = policy

    def infer(self, batch: Sequence[PackedInput]) -> list[Tensor]:
        with with_initial_adapters(self._policy):
            return self._engine.infer(batch)

    def hidden_states(self, batch: Sequence[PackedInput]) -> list[ReferenceStates]:
        """Return vocabulary distributions; weights must be unsharded (below ZeRO-3, no FSDP2)."""
        with with_initial_adapters(self._policy):
            return [self._policy.eval().hidden_states(x.to(self._engine.device)) for x in batch]
