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
    """Pass of this rank; `index` is None for padding."""

    index: int | None
    x: PackedInput


def assign_passes(batch: Sequence[PackedInput], ranks: Ranks) -> Iterator[Pass]:
    """Yield this rank's passes, not yet on its device."""
    for first in range(0, len(batch), ranks.data_size):
        index = first + ranks.data_rank
        mine = index < len(batch)
        yield Pass(index if mine else None, batch[index if mine else first])


def passes(batch: Sequence[PackedInput], ranks: Ranks) -> Iterator[Pass]:
    return (Pass(each.index, each.x.to(ranks.device)) for each in assign_passes(batch, ranks))


def first_of(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _zero_loss(output: Any) -> Tensor:
    zero = first_of(output).sum() * 0.0
    return zero + output.values.sum() * 0.0 if _has_values(output) else zero


def _has_values(output: Any) -> bool:
    return isinstance(output, Sampled) and output.values is not None


class OnRanks:
    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def data_size(self) -> int:
        return self._ranks.data_size

    @property
    def device(self) -> torch.device:
        return self._ranks.device

    def shares(
        self, model: Callable[[PackedInput], Any], batch: Sequence[PackedInput], loss: LossFunction[Any]
    ) -> Iterator[Tensor]:
        for forward in passes(batch, self._ranks):
            yield self.share(forward, model(forward.x), loss)

    def share(self, forward: Pass, output: Any, loss: LossFunction[Any]) -> Tensor:
        """Return a pass's loss, times the number of shards, as libraries average gradients.

        Zero losses of policy and value head give all ranks gradients of the same weights.
        """
        share = _zero_loss(output) if forward.index is None else loss(forward.index, output)
        if forward.index is not None and _has_values(output):
            share = share + _zero_loss(output)
        return share * self._ranks.num_shards

    def outputs(
        self,
        model: Callable[[PackedInput], Any],
        batch: Sequence[PackedInput],
        read: Callable[[Any], Tensor] | None = None,
    ) -> list[Tensor]:
        results: dict[int, Tensor] = {}
        like = torch.empty(0)
        for forward in passes(batch, self._ranks):
            output = (read or first_of)(model(forward.x))
            like = output[..., :0]
            if forward.index is not None and self._ranks.is_first_of_copy:
                results[forward.index] = output
        return gather_outputs(results, like, batch, self._ranks)


def gather_outputs(
    results: dict[int, Tensor], like: Tensor, batch: Sequence[PackedInput], ranks: Ranks
) -> list[Tensor]:
    """Return all ranks' results, [*rows, M] each. like: [*rows, 0]"""
    lengths = [len(x.positions) for x in batch]
    if ranks.world_size == 1 or not batch:  # a batch may have none of a teacher's tags
        return [results[i] for i in range(len(batch))]
    parts = [results.get(i, like.new_zeros(*like.shape[:-1], n)) for i, n in enumerate(lengths)]
    results_of_all = torch.cat(parts, -1)
    dist.all_reduce(results_of_all)
    return list(results_of_all.split(lengths, -1))
