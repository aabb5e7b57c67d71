"""How a batch's passes are dealt out to ranks, for engines in which every rank must run equally many."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.engines.base import LossFunction
from trainer.engines.processes import Ranks
from trainer.models.packing import PackedInput


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
    """What `TrainEngine.infer` returns of a model's output."""
    return output[0] if isinstance(output, tuple) else output


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
        """The loss of each pass of this rank, times `world_size` for libraries that average gradients over ranks."""
        for each in passes(batch, self._ranks):
            output = model(each.x)
            share = _first_of(output).sum() * 0.0 if each.index is None else loss(each.index, output)
            yield share * self.world_size

    def outputs(self, model: Callable[[PackedInput], Any], batch: Sequence[PackedInput]) -> list[Tensor]:
        """What `TrainEngine.infer` returns, on all ranks."""
        found: dict[int, Tensor] = {}
        for each in passes(batch, self._ranks):
            output = _first_of(model(each.x))
            if each.index is not None:
                found[each.index] = output
        return _everybodys(found, batch, self._ranks)


def _everybodys(found: dict[int, Tensor], batch: Sequence[PackedInput], ranks: Ranks) -> list[Tensor]:
    """What each of the ranks has found of its micro-batches, on all of them."""
    lengths = [len(x.positions) for x in batch]
    if ranks.world_size == 1:
        return [found[i] for i in range(len(batch))]
    parts = [found.get(i, torch.zeros(n, device=ranks.device)) for i, n in enumerate(lengths)]
    everything = torch.cat(parts)
    dist.all_reduce(everything)
    return list(everything.split(lengths))
