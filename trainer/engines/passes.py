"""How a batch's passes are dealt out to ranks, for engines in which every rank must run equally many."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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


def first_of(output: Any) -> Tensor:
    """What `TrainEngine.infer` returns of a model's output."""
    return output[0] if isinstance(output, tuple) else output


def everybodys(found: dict[int, Tensor], batch: Sequence[PackedInput], ranks: Ranks) -> list[Tensor]:
    """What each of the ranks has found of its micro-batches, on all of them."""
    lengths = [len(x.positions) for x in batch]
    if ranks.world_size == 1:
        return [found[i] for i in range(len(batch))]
    parts = [found.get(i, torch.zeros(n, device=ranks.device)) for i, n in enumerate(lengths)]
    everything = torch.cat(parts)
    dist.all_reduce(everything)
    return list(everything.split(lengths))
