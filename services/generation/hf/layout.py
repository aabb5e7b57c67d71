"""Tokens of a forward pass, and the rows of the KV cache that they attend to.

Invariant: a token attends only to its own row, at positions up to its own.
"""

# pyright: basic
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_COST = 2048
"""Pairs of query and key that cost as much as another kernel call."""
MAX_PADDING = 0.125
"""Padded pairs of larger blocks, of their real ones."""


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
    """Chunks whose queries are padded to one tensor.

    rows: of the cache, a slice if adjacent, else [R] int64; length: keys of a row, from position 0; tokens: the chunks'
    in the pass; padding: [n] int64 each, row and column of the tokens in [R, width], None if all chunks have `width`
    tokens; positions: [R, width] int64, -1 where padded.
    """

    rows: slice | Tensor
    length: int
    tokens: slice
    padding: tuple[Tensor, Tensor] | None
    positions: Tensor

    @classmethod
    def of(cls, chunks: Sequence[Chunk], first_token: int) -> "Block":
        numbers, counts = [chunk.row for chunk in chunks], [len(chunk.tokens) for chunk in chunks]
        width, total, num_rows = max(counts), sum(counts), len(chunks)
        starts = torch.tensor([chunk.start for chunk in chunks])
        positions, padding = starts[:, None] + torch.arange(width), None
        if width * num_rows > total:
            is_padded = torch.arange(width) >= torch.tensor(counts)[:, None]
            row, column = torch.where(~is_padded)
            positions, padding = positions.masked_fill(is_padded, -1), (row, column)
        adjacent = range(numbers[0], numbers[0] + num_rows)
        rows = slice(adjacent.start, adjacent.stop) if numbers == [*adjacent] else torch.tensor(numbers)
        length = max(chunk.end for chunk in chunks)
        return cls(rows, length, slice(first_token, first_token + total), padding, positions)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask, [R, 1, width, length]; None if every key is attended to."""
        if self.positions.numel() == 1 and (window is None or self.length <= window):
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
        groups = _group(chunks)
        chunks = [chunk for group in groups for chunk in group]
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
        self.blocks: list[Block] = []
        for group in groups:
            first_token = self.blocks[-1].tokens.stop if self.blocks else 0
            self.blocks.append(Block.of(group, first_token))
        self._masks: dict[tuple[int, int | None, int], Tensor | None] = {}

    def select(self, rows: Container[int]) -> tuple[Tensor, Tensor]:
        """Return the indices of some rows' tokens, [n], and chunks, [c] int64."""
        chosen = torch.tensor([row in rows for row in self.rows])
        return chosen.repeat_interleave(self._counts).nonzero()[:, 0], chosen.nonzero()[:, 0]

    def mask(self, place: int, window: int | None, shared: int, dtype: torch.dtype) -> Tensor | None:
        """Return a block's mask, with each query repeated for the `shared` heads of a key."""
        key = (place, window, shared)
        if key not in self._masks:
            mask = self.blocks[place].mask(window, dtype)
            repeated = mask if mask is None or mask.shape[2] == 1 else mask.repeat_interleave(shared, 2)
            self._masks[key] = repeated
        return self._masks[key]


def _group(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Group chunks of similar width and length, where padding costs less than another block."""
    groups: list[list[Chunk]] = []
    width = length = pairs = 0
    for chunk in sorted(chunks, key=lambda each: (-len(each.tokens), -each.end, each.row)):
        own = len(chunk.tokens) * chunk.end
        if groups:
            longest, total = max(length, chunk.end), pairs + own
            padding = width * longest * (len(groups[-1]) + 1) - total
            if padding <= max(BLOCK_COST, MAX_PADDING * total):
                groups[-1].append(chunk)
                length, pairs = longest, total
                continue
        groups.append([chunk])
        width, length, pairs = len(chunk.tokens), chunk.end, own
    return groups
