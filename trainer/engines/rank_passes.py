"""How a batch's passes are dealt out to ranks, for engines in which every rank must run equally many."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.trainer.engines.base import LossFunction
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.policy import Sampled


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass of this rank; `index` is None where it only keeps step with the others."""

    index: int | None
    x: PackedInput


def passes(batch: Sequence[PackedInput], ranks: Ranks) -> Iterator[Pass]:
    """This rank's, in order."""
    for first in range(0, len(batch), ranks.world_size):
        index = first + ranks.rank
        mine = index < len(batch)
        yield Pass(index if mine else None, batch[index if mine else first].to(ranks.device))


def _first_of(output: Any) -> Tensor:
    """What `TrainEngine.infer` returns of a model's output unless told otherwise."""
    return output[0] if isinstance(output, tuple) else output


def _nothing(output: Any) -> Tensor:
    """A loss of zero that reaches every weight."""
    zero = _first_of(output).sum() * 0.0
    return zero + output.values.sum() * 0.0 if _has_values(output) else zero


def _has_values(output: Any) -> bool:
    return isinstance(output, Sampled) and output.values is not None


class OnRanks:
    """What engines of several ranks have alike: their place among them, and passes without a gradient."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        return self._ranks.world_size

    @property
    def device(self) -> torch.device:
        return self._ranks.device

    def shares(
        self, model: Callable[[PackedInput], Any], batch: Sequence[PackedInput], loss: LossFunction[Any]
    ) -> Iterator[Tensor]:
        """The loss of each pass of this rank, times `world_size` for libraries that average gradients over ranks.

        Libraries want gradients of the same weights on all ranks: a loss of the policy alone, or of its value head alone, is
        one of both.
        """
        for each in passes(batch, self._ranks):
            output = model(each.x)
            share = _nothing(output) if each.index is None else loss(each.index, output)
            if each.index is not None and _has_values(output):
                share = share + _nothing(output)
            yield share * self.world_size

    def outputs(
        self,
        model: Callable[[PackedInput], Any],
        batch: Sequence[PackedInput],
        read: Callable[[Any], Tensor] | None = None,
    ) -> list[Tensor]:
        """What `TrainEngine.infer` returns, on all ranks."""
        found: dict[int, Tensor] = {}
        rows = torch.Size()
        for each in passes(batch, self._ranks):
            output = (read or _first_of)(model(each.x))
            rows = output.shape[:-1]
            if each.index is not None:
                found[each.index] = output
        return _everybodys(found, rows, batch, self._ranks)


def _everybodys(found: dict[int, Tensor], rows: torch.Size, batch: Sequence[PackedInput], ranks: Ranks) -> list[Tensor]:
    """What each of the ranks has found of its micro-batches, on all of them: [*rows, M] each."""
    lengths = [len(x.positions) for x in batch]
    if ranks.world_size == 1 or not batch:  # a teacher may find nothing of its tags in a batch
        return [found[i] for i in range(len(batch))]
    parts = [found.get(i, torch.zeros(*rows, n, device=ranks.device)) for i, n in enumerate(lengths)]
    everything = torch.cat(parts, -1)
    dist.all_reduce(everything)
    return list(everything.split(lengths, -1))
