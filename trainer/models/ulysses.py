"""Exchange of tokens and heads around attention, for sequence parallelism (Ulysses, arXiv:2309.14509)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from offbeat.trainer.models.packing import SequenceShard

Exchange = Callable[[Tensor, SequenceShard], Tensor]


def split_heads(states: Tensor, shard: SequenceShard) -> Tensor:
    """Exchange tokens for heads: [1, H, n, D], this rank's n tokens -> [1, H / R, N, D], its part of the heads.

    R ranks share each of fewer than R heads of keys or values.
    """
    rows, size = states[0].transpose(0, 1), shard.size
    if rows.shape[1] % size:
        rows = rows.repeat_interleave(size // rows.shape[1], dim=1)
    return _Exchange.apply(rows, shard, _to_heads, _to_tokens)[: shard.num_tokens].transpose(0, 1)[None]


def join_heads(states: Tensor, shard: SequenceShard) -> Tensor:
    """Exchange heads for tokens: [1, N, H / R, D] -> [1, n, H, D]."""
    padding = sum(shard.lengths) - shard.num_tokens
    rows = pad(states[0], (0, 0, 0, 0, 0, padding))
    return _Exchange.apply(rows, shard, _to_tokens, _to_heads)[None]


class _Exchange(torch.autograd.Function):
    """`_to_heads` or `_to_tokens`, each of which gives the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shard: SequenceShard, exchange: Exchange, inverse: Exchange) -> Tensor:
        ctx.shard, ctx.inverse = shard, inverse
        return exchange(rows, shard)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.inverse(grads[0], ctx.shard), None, None, None


def _to_heads(rows: Tensor, shard: SequenceShard) -> Tensor:
    """[n, H, D] -> [N, H / R, D]"""
    count, heads, width = rows.shape
    parts = rows.view(count, shard.size, heads // shard.size, width).transpose(0, 1).flatten(0, 1)
    out = rows.new_empty(sum(shard.lengths), heads // shard.size, width)
    dist.all_to_all_single(out, parts.contiguous(), list(shard.lengths), [count] * shard.size, group=shard.group)
    return out


def _to_tokens(rows: Tensor, shard: SequenceShard) -> Tensor:
    """[N, H / R, D] -> [n, H, D]"""
    count, (_, heads, width) = shard.lengths[shard.rank], rows.shape
    out = rows.new_empty(shard.size * count, heads, width)
    dist.all_to_all_single(out, rows.contiguous(), [count] * shard.size, list(shard.lengths), group=shard.group)
    return out.view(shard.size, count, heads, width).transpose(0, 1).flatten(1, 2)
