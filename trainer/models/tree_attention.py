"""Attention over prefix trees: blocks of tokens, each computed once, continued by any number of other blocks.

Invariant: results and gradients equal those of the separate sequences from a root to each leaf. Tree Training:
arXiv:2511.00413.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import embedding

from offbeat.trainer.models.dot_product import dot_product_attention

IntArray = npt.NDArray[np.int64]
KEY_COST = 32
"""Attention scores that take as long as one more key of a tile: its gathering and its share of narrow matrix products."""
MIN_SAVED_SCORES = 1 << 16
"""Attention scores that a division of a `TileBatch` must save."""


class Tile(NamedTuple):
    """Blocks that attend together: a block with some of its descendants, or siblings with theirs.

    blocks: ascending, the first's ancestors are those of all; length: of the blocks, prefix: of these ancestors, tokens.
    """

    blocks: tuple[int, ...]
    length: int
    prefix: int

    @property
    def cost(self) -> int:
        """Return the time of attention and of gathering its keys, in scores."""
        return (self.length + KEY_COST) * (self.prefix + self.length)

    def join(self, other: "Tile") -> "Tile":
        """Add a sibling, or a child without its parent's prefix."""
        return Tile(tuple(sorted(self.blocks + other.blocks)), self.length + other.length, self.prefix)


@dataclass(frozen=True, slots=True)
class TileBatch:
    """b tiles of at most q tokens, after at most p tokens of their ancestors.

    queries: [b, q], keys: [b, p + q], int64 rows, 0 where padded; mask: [b or 1, 1, q, p + q] bool, None for causal;
    slots: [n] int64, indices of the tiles' tokens in [b * q].
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor | None
    slots: Tensor

    def to(self, device: torch.device) -> "TileBatch":
        mask = None if self.mask is None else self.mask.to(device)
        return TileBatch(self.queries.to(device), self.keys.to(device), mask, self.slots.to(device))


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """K blocks in a row of N tokens.

    rows: [N] int64, the batches' tokens; position_ids, before: [N] int64, a token's depth from its root, and its
    predecessor (itself for a root's first); longest: tokens of the longest path.
    """

    batches: tuple[TileBatch, ...]
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
        blocks = _Blocks.of(starts, parent_ids)
        before = np.maximum(np.arange(starts[-1]) - 1, 0)
        depths = np.empty(starts[-1], dtype=np.int64)
        for start, own, prefix in zip(starts[:-1], blocks.own, blocks.prefixes, strict=True):
            depths[own] = len(prefix) + np.arange(len(own))
            before[start] = prefix[-1] if len(prefix) else start
        batches = tuple(blocks.batch(part) for part in _divide(blocks.tiles()))
        rows = torch.cat([batch.queries.flatten()[batch.slots] for batch in batches])
        return cls(batches, rows, torch.from_numpy(depths), torch.from_numpy(before), int(depths.max()) + 1)

    def to(self, device: torch.device) -> "TreeLayout":
        return replace(
            self,
            batches=tuple(batch.to(device) for batch in self.batches),
            rows=self.rows.to(device),
            position_ids=self.position_ids.to(device),
            before=self.before.to(device),
        )


@dataclass(frozen=True, slots=True)
class _Blocks:
    """parents: -1 for a root; own, prefixes: rows of each block and of its ancestors."""

    parents: Sequence[int]
    own: Sequence[IntArray]
    prefixes: Sequence[IntArray]

    @classmethod
    def of(cls, starts: Sequence[int], parents: Sequence[int]) -> "_Blocks":
        own = [np.arange(start, end) for start, end in pairwise(starts)]
        prefixes: list[IntArray] = []
        for block, parent in enumerate(parents):
            prefixes.append(own[block][:0] if parent < 0 else np.concatenate([prefixes[parent], own[parent]]))
        return cls(parents, own, prefixes)

    def tiles(self) -> list[Tile]:
        """Join blocks, from the leaves to the roots, where masked scores take less time than repeated keys."""
        done: list[Tile] = []
        children: defaultdict[int, list[Tile]] = defaultdict(list)
        for block in reversed(range(len(self.parents))):
            tile = Tile((block,), len(self.own[block]), len(self.prefixes[block]))
            for child in _join_siblings(children.pop(block, [])):
                joined = tile.join(child)
                if joined.cost < tile.cost + child.cost:
                    tile = joined
                else:
                    done.append(child)
            children[self.parents[block]].append(tile)
        return done + children[-1]

    def batch(self, tiles: Sequence[Tile]) -> TileBatch:
        rows = [np.concatenate([self.own[block] for block in tile.blocks]) for tile in tiles]
        queries, before = _stack(rows), _stack([self.prefixes[tile.blocks[0]] for tile in tiles])
        valid = np.arange(queries.shape[1]) < np.array([[tile.length] for tile in tiles])
        mask = self._mask(tiles, queries.shape[1], before.shape[1])
        return TileBatch(
            torch.from_numpy(queries),
            torch.from_numpy(np.concatenate([before, queries], 1)),
            None if mask is None else torch.from_numpy(mask)[:, None],
            torch.from_numpy(np.flatnonzero(valid)),
        )

    def _mask(self, tiles: Sequence[Tile], length: int, prefix: int) -> npt.NDArray[np.bool_] | None:
        """Return [b or 1, q, p + q], with at least one key in each row, or None for causal."""
        are_equal = len(tiles[0].blocks) == 1 and len({(len(tile.blocks), tile.prefix) for tile in tiles}) == 1
        if are_equal and prefix == 0:
            return None
        mask = np.zeros((1 if are_equal else len(tiles), length, prefix + length), dtype=np.bool_)
        mask[:, :, prefix:] = np.tri(length, dtype=np.bool_)
        for row, tile in zip(mask, tiles, strict=False):
            row[:, : tile.prefix] = True
            if len(tile.blocks) > 1:
                row[: tile.length, prefix : prefix + tile.length] &= self._descends(tile)
        return mask

    def _descends(self, tile: Tile) -> npt.NDArray[np.bool_]:
        """Return [q, q], whether a token's block is another's or a descendant of it."""
        place = {block: i for i, block in enumerate(tile.blocks)}
        descends = np.eye(len(place), dtype=np.bool_)
        for block, i in place.items():
            if (parent := place.get(self.parents[block])) is not None:
                descends[i] |= descends[parent]
        lengths = [len(self.own[block]) for block in tile.blocks]
        return descends.repeat(lengths, 0).repeat(lengths, 1)


def _join_siblings(tiles: Sequence[Tile]) -> list[Tile]:
    """Join neighbours where masked scores take less time than repeated keys."""
    joined: list[Tile] = []
    for tile in tiles:
        both = joined[-1].join(tile) if joined else tile
        if joined and both.cost < joined[-1].cost + tile.cost:
            joined[-1] = both
        else:
            joined.append(tile)
    return joined


def _divide(tiles: Sequence[Tile]) -> Iterator[list[Tile]]:
    """Yield parts of tiles of similar sizes; roots alone need no mask."""
    are_roots = [tile.prefix == 0 and len(tile.blocks) == 1 for tile in tiles]
    sizes = np.array([[tile.length, tile.prefix] for tile in tiles])
    for kind in (True, False):
        for part in _divide_by_size(sizes, np.flatnonzero(np.array(are_roots) == kind)):
            yield [tiles[i] for i in part]


def _divide_by_size(sizes: IntArray, picked: IntArray) -> Iterator[IntArray]:
    """Yield parts of `picked`. sizes: [T, 2], tokens of tiles and of their prefixes"""
    if not len(picked):
        return
    best, saved = None, MIN_SAVED_SCORES
    for column in (0, 1) if len(picked) > 1 else ():
        order = picked[np.argsort(sizes[picked, column], kind="stable")]
        ordered = sizes[order]
        whole = _padded_cost(ordered)
        for cut in {len(order) // 2, int(np.diff(ordered[:, column]).argmax()) + 1}:
            saving = whole - _padded_cost(ordered[:cut]) - _padded_cost(ordered[cut:])
            if saving > saved:
                best, saved = (order[:cut], order[cut:]), saving
    if best is None:
        yield np.sort(picked)
        return
    for part in best:
        yield from _divide_by_size(sizes, part)


def _padded_cost(sizes: IntArray) -> int:
    length, prefix = sizes.max(0).tolist()
    return len(sizes) * Tile((), length, prefix).cost


def _stack(rows: Sequence[IntArray]) -> IntArray:
    stacked = np.zeros((len(rows), max(len(row) for row in rows)), dtype=np.int64)
    for place, row in zip(stacked, rows, strict=True):
        place[: len(row)] = row
    return stacked


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
