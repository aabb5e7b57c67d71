"""Teachers whose distributions another engine computes."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from offbeat.trainer.config.roles import TrainDtype
from offbeat.trainer.models.packing import PackedInput


class PromptDistributions(Protocol):
    """Arrays [N - 1, K] of the tokens after a sequence's first, most probable first."""

    @property
    def ids(self) -> object: ...
    @property
    def logprobs(self) -> object: ...


class PromptEngine(Protocol):
    """Interface of `services.generation.vllm.prompt_logprobs`, which a learner does not import."""

    def score(self, sequences: Sequence[Sequence[int]]) -> Sequence[PromptDistributions]: ...


MIN_TAIL = 2.0**-22
"""Least probability of all tokens but the first K: the rounding of float32 logprobs hides a smaller one."""

OpenPromptEngine = Callable[[Path, int, int, TrainDtype, str, int], PromptEngine]
"""(folder, K, maximum tokens, dtype, device, threads) -> engine."""


class PromptModel:
    """`LogprobModel` of top queries."""

    def __init__(self, engine: PromptEngine) -> None:
        self._engine = engine

    def infer(self, batch: Sequence[PackedInput]) -> list[Tensor]:
        """Return [2 K + 1, M] float64 per micro-batch, as `top_logprobs`."""
        cuts = [list(pairwise(x.packing.cu_seqlens.tolist())) for x in batch]
        sequences = [x.tokens[a:b].tolist() for x, ranges in zip(batch, cuts, strict=True) for a, b in ranges]
        scored = iter(self._engine.score(sequences))
        return [_rows(x.positions, [(start, next(scored)) for start, _ in r]) for x, r in zip(batch, cuts, strict=True)]


def _rows(positions: Tensor, scored: Sequence[tuple[int, PromptDistributions]]) -> Tensor:
    """positions: [M], of predicted tokens. scored: first position and top tokens of each sequence."""
    at = torch.cat([torch.arange(start + 1, start + 1 + len(_tensor(top.ids))) for start, top in scored])
    ids = torch.cat([_tensor(top.ids) for _, top in scored])
    logprobs = torch.cat([_tensor(top.logprobs) for _, top in scored])
    rows = torch.searchsorted(at, positions.cpu())
    ids, logprobs = ids[rows].double(), logprobs[rows]
    others = torch.log1p(-logprobs.exp().sum(1, keepdim=True).clamp(max=1 - MIN_TAIL))
    return torch.cat([ids, logprobs, others], 1).T.contiguous()


def _tensor(values: object) -> Tensor:
    return torch.as_tensor(values)
