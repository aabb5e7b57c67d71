"""Attention over prefix trees: blocks of tokens, each computed once, continued by any number of other blocks.

Invariant: results and gradients equal those of the separate sequences from a root to each leaf. Tree Training:
arXiv:2511.00413.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from offbeat.trainer.models.dot_product import dot_product_attention

IntArray = npt.NDArray[np.int64]
MIN_SAVED_SCORES = 1 << 16
"""Attention scores that a division of a `BlockBatch` must save."""


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """b blocks of at most q tokens, after at most p tokens of their ancestors.

    queries: [b, q], keys: [b, p + q], int64 rows, 0 where padded; mask: [b or 1, 1, q, p + q] bool, None for causal;
    slots: [n] int64, indices of the blocks' tokens in [b * q].
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor | None
    slots: Tensor

    def to(self, device: torch.device) -> "BlockBatch":
        mask = None if self.mask is None else self.mask.to(device)
        return BlockBatch(self.queries.to(device), self.keys.to(device), mask, self.slots.to(device))


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """K blocks in a row of N tokens.

    rows: [N] int64, the batches' tokens; position_ids, before: [N] int64, a token's depth from its root, and its
    predecessor (itself for a root's first); longest: tokens of the longest path.
    """

    batches: tuple[BlockBatch, ...]
    rows: Tensor
    position_ids: Tensor
    before: Tensor
    longest: int

    @classmethod
    def of(cls, cu_seqlens: Tensor, parents: Tensor) -> "TreeLayout":
        """Build from borders [K + 1] and parents [K], -1 for a root.

        Raises:
            ValueError: a block precedes its parent.
        """
        starts, parent_ids = cu_seqlens.tolist(), parents.tolist()
        if any(parent >= block for block, parent in enumerate(parent_ids)):
            raise ValueError(f"a block precedes its parent: parents {parent_ids}")
        prefixes: list[IntArray] = []
        own = [np.arange(start, end) for start, end in pairwise(starts)]
        before = np.maximum(np.arange(starts[-1]) - 1, 0)
        depths = np.empty(starts[-1], dtype=np.int64)
        for block, parent in enumerate(parent_ids):
            prefix = own[block][:0] if parent < 0 else np.concatenate([prefixes[parent], own[parent]])
            prefixes.append(prefix)
            depths[own[block]] = len(prefix) + np.arange(len(own[block]))
            before[starts[block]] = prefix[-1] if len(prefix) else starts[block]
        sizes = np.array([[len(rows), len(prefix)] for rows, prefix in zip(own, prefixes, strict=True)])
        roots = sizes[:, 1] == 0
        parts = [*_divide(sizes, np.flatnonzero(roots)), *_divide(sizes, np.flatnonzero(~roots))]
        batches = tuple(_batch([own[k] for k in part], [prefixes[k] for k in part]) for part in parts)
        rows = torch.cat([batch.queries.flatten()[batch.slots] for batch in batches])
        return cls(batches, rows, torch.from_numpy(depths), torch.from_numpy(before), int(sizes.sum(1).max()))

    def to(self, device: torch.device) -> "TreeLayout":
        return replace(
            self,
            batches=tuple(batch.to(device) for batch in self.batches),
            rows=self.rows.to(device),
            position_ids=self.position_ids.to(device),
            before=self.before.to(device),
        )


def _divide(sizes: IntArray, blocks: IntArray) -> Iterator[IntArray]:
    """Yield parts of blocks of similar sizes. sizes: [K, 2], tokens of blocks and of their prefixes"""
    if not len(blocks):
        return
    best, saved = None, MIN_SAVED_SCORES
    for column in (0, 1) if len(blocks) > 1 else ():
        order = blocks[np.argsort(sizes[blocks, column], kind="stable")]
        ordered = sizes[order]
        whole = _num_scores(ordered)
        for cut in {len(order) // 2, int(np.diff(ordered[:, column]).argmax()) + 1}:
            saving = whole - _num_scores(ordered[:cut]) - _num_scores(ordered[cut:])
            if saving > saved:
                best, saved = (order[:cut], order[cut:]), saving
    if best is None:
        yield np.sort(blocks)
        return
    for part in best:
        yield from _divide(sizes, part)


def _num_scores(sizes: IntArray) -> int:
    length, prefix = sizes.max(0)
    return int(len(sizes) * length * (length + prefix))


def _batch(own: Sequence[IntArray], prefixes: Sequence[IntArray]) -> BlockBatch:
    lengths = torch.tensor([len(rows) for rows in own])
    prefix_lens = torch.tensor([len(rows) for rows in prefixes])
    queries, before = _stack(own), _stack(prefixes)
    steps = torch.arange(queries.shape[1])
    valid = (steps < lengths[:, None]).flatten()
    mask = None
    if before.shape[1]:
        lens = prefix_lens.unique()
        visible = torch.arange(before.shape[1]) < (lens if len(lens) == 1 else prefix_lens)[:, None]
        causal = (steps[:, None] >= steps[None]).expand(len(visible), -1, -1)
        mask = torch.cat([visible[:, None].expand(-1, len(steps), -1), causal], 2)[:, None]
    return BlockBatch(queries, torch.cat([before, queries], 1), mask, valid.nonzero()[:, 0])


def _stack(rows: Sequence[IntArray]) -> Tensor:
    width = max(len(r) for r in rows)
    return torch.stack([pad(torch.from_numpy(r), (0, width - len(r))) for r in rows])


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scale: float | None, dropout: float
) -> Tensor:
    """Compute attention: query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D]."""
    gqa = query.shape[1] != key.shape[1]
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    outputs = [
        dot_product_attention(
            _gather(q, batch.queries),
            _gather(k, batch.keys),
            _gather(v, batch.keys),
            attn_mask=batch.mask,
            dropout_p=dropout,
            is_causal=batch.mask is None,
            scale=scale,
            enable_gqa=gqa,
        )
        .transpose(1, 2)
        .flatten(0, 1)
        .index_select(0, batch.slots)
        for batch in layout.batches
    ]
    return torch.empty_like(q).index_copy(0, layout.rows, torch.cat(outputs))[None]


def _gather(rows: Tensor, indexes: Tensor) -> Tensor:
    """Return [N, H, D] at [b, n] -> [b, H, n, D]."""
    # An index has a gradient that takes twice the time on a CPU
    return embedding(indexes, rows.flatten(1)).unflatten(2, rows.shape[1:]).transpose(1, 2)
