"""Tokens of a forward pass, and the rows of the KV cache that they attend to.

Invariant: a token attends only to its own row, at positions up to its own.
"""

# pyright: basic
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MAX_PADDING = 2
"""Maximum ratio of padded to real queries in a kernel call that neighbouring rows share."""


class Chunk(NamedTuple):
    """Tokens of one row to compute."""

    row: int
    start: int
    """Position of the first token."""
    tokens: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows `[first, last)` whose queries are padded to one tensor.

    tokens: [n] int64, indices in the pass; row, column: [n] int64, positions in [last - first, width]; positions: [last
    - first, width] int64, -1 where padded; length: keys read, from position 0.
    """

    first: int
    last: int
    width: int
    length: int
    tokens: Tensor
    row: Tensor
    column: Tensor
    positions: Tensor

    @classmethod
    def of(cls, chunks: Sequence[Chunk], offsets: Sequence[int]) -> "Block":
        """offsets: indices of the chunks' first tokens in the pass."""
        first, last = chunks[0].row, chunks[-1].row + 1
        width = max(len(chunk.tokens) for chunk in chunks)
        counts = torch.tensor([len(chunk.tokens) for chunk in chunks])
        column = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        row = (torch.tensor([chunk.row for chunk in chunks]) - first).repeat_interleave(counts)
        positions = torch.full((last - first, width), -1)
        positions[row, column] = torch.tensor([chunk.start for chunk in chunks]).repeat_interleave(counts) + column
        tokens = torch.tensor(offsets).repeat_interleave(counts) + column
        return cls(first, last, width, max(chunk.end for chunk in chunks), tokens, row, column, positions)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask, [rows, 1, width, length]; None if every key is attended to."""
        if self.first + 1 == self.last and self.width == 1 and (window is None or self.length <= window):
            return None
        keys = torch.arange(self.length)
        positions = self.positions[:, None, :, None]
        allowed = keys <= positions
        if window is not None:
            allowed &= keys > positions - window
        # of padded queries everything is masked: the least number instead of -inf, so that they are finite
        return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)


class StepLayout:
    """Input of a forward pass over chunks of rows.

    token_ids, position_ids: [1, T] int64; slots: [T] int64, in a cache of [rows * row_length] tokens; last: [C] int64,
    indices of the chunks' last tokens.
    """

    def __init__(self, chunks: Sequence[Chunk], row_length: int) -> None:
        chunks = sorted(chunks)
        counts = torch.tensor([len(chunk.tokens) for chunk in chunks])
        starts = torch.tensor([chunk.start for chunk in chunks])
        rows = torch.tensor([chunk.row for chunk in chunks])
        ends = counts.cumsum(0)
        positions = torch.arange(int(ends[-1])) + (starts - (ends - counts)).repeat_interleave(counts)
        self.rows = [chunk.row for chunk in chunks]
        self.token_ids = torch.tensor([token for chunk in chunks for token in chunk.tokens])[None]
        self.position_ids = positions[None]
        self.slots = rows.repeat_interleave(counts) * row_length + positions
        self.last = ends - 1
        self._counts = counts
        self.blocks = _make_blocks(chunks, (ends - counts).tolist())
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    def select(self, rows: Container[int]) -> tuple[Tensor, Tensor]:
        """Return the indices of some rows' tokens, [n], and chunks, [c] int64."""
        chosen = torch.tensor([row in rows for row in self.rows])
        return chosen.repeat_interleave(self._counts).nonzero()[:, 0], chosen.nonzero()[:, 0]

    def mask(self, place: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        key = (place, window)
        if key not in self._masks:
            self._masks[key] = self.blocks[place].mask(window, dtype)
        return self._masks[key]


def _make_blocks(chunks: Sequence[Chunk], offsets: Sequence[int]) -> list[Block]:
    """Group rows into blocks; single tokens and longer chunks apart."""
    blocks: list[Block] = []
    for is_single in (True, False):
        group = [(c, o) for c, o in zip(chunks, offsets, strict=True) if (len(c.tokens) == 1) == is_single]
        while group:
            count = _count_together([chunk for chunk, _ in group])
            blocks.append(Block.of([c for c, _ in group[:count]], [o for _, o in group[:count]]))
            group = group[count:]
    return blocks


def _count_together(chunks: Sequence[Chunk]) -> int:
    best, width, total = 1, 0, 0
    for count, chunk in enumerate(chunks, 1):
        width, total = max(width, len(chunk.tokens)), total + len(chunk.tokens)
        if (chunk.row + 1 - chunks[0].row) * width <= MAX_PADDING * total:
            best = count
    return best
