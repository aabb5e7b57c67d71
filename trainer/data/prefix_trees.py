"""Micro-batches of prefix trees: what sequences have in common from their start is one block of tokens.

Sampled tokens are shared like others: a block's token is scored once for each sequence that sampled it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs
from torch import Tensor

from offbeat.services.messages.types import PromptImage
from offbeat.trainer.data.batch import Batch, MicroBatch, balanced_bins, sequences_by_group

MIN_BLOCK_TOKENS = 8
"""Shorter common parts are computed again: a block of their own costs more."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefixTrees:
    """Trees of sequences, by their leaves, which are sorted by their tokens.

    leaves: a longest sequence each, last, after those that are prefixes of it; lengths: [s] of the longest; common:
    [s - 1] tokens that neighbours share; of any run of neighbours, the smallest is what all of them share.
    """

    leaves: list[list[int]]
    lengths: IntArray
    common: IntArray

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum() - self.common.sum())

    def pick(self, indexes: IntArray) -> "PrefixTrees":
        """Return the trees of some leaves, in ascending order."""
        common = [self.common[a:b].min() for a, b in pairwise(indexes)]
        return PrefixTrees([self.leaves[i] for i in indexes], self.lengths[indexes], np.array(common, dtype=np.int64))

    def divide(self, max_tokens: int) -> list[IntArray]:
        """Return the leaves of each tree, and of parts of one of more than `max_tokens`, cut where least is shared."""
        borders = [0, *(np.flatnonzero(self.common == 0) + 1).tolist(), len(self.leaves)]
        return [part for start, end in pairwise(borders) for part in self._cut(start, end, max_tokens)]

    def _cut(self, start: int, end: int, max_tokens: int) -> Iterator[IntArray]:
        while start < end:
            added = self.lengths[start:end].copy()
            added[1:] -= self.common[start : end - 1]
            totals = added.cumsum()
            count = max(1, int(np.searchsorted(totals, max_tokens, side="right")))
            if count < len(totals):
                enough = min(count - 1, int(np.searchsorted(totals, max_tokens / 2)))
                shared = self.common[start + enough : start + count]
                count -= int(shared[::-1].argmin())
            yield np.arange(start, start + count)
            start += count


def shared_microbatches(
    batch: Batch, sequences: Sequence[int], max_tokens: int, *, multiple_of: int = 1
) -> list[MicroBatch]:
    """Pack like `microbatches`, with each tree in one micro-batch unless it is too large."""
    if not sequences:
        return []
    trees = _sort(batch, sequences)
    parts = trees.divide(min(max_tokens, -(-trees.num_tokens // multiple_of)))
    bins = balanced_bins([trees.pick(part).num_tokens for part in parts], max_tokens, multiple_of)
    picked = [trees.pick(np.sort(np.concatenate([parts[i] for i in indexes]))) for indexes in bins]
    sampled = _sampled_by_sequence(batch)
    return [_Builder(batch, sampled).build([each]) for each in picked]


def whole_group_microbatches(
    batch: Batch, sequences: Sequence[int], max_tokens: int, *, share_prefix: bool, multiple_of: int = 1
) -> list[MicroBatch]:
    """Pack like `microbatches`, a group never divided; one that is too large is alone.

    share_prefix: compute a group's common prefixes once.
    """
    chosen = set(sequences)
    groups = [members for members in sequences_by_group(batch) if members[0] in chosen]
    trees = [_sort(batch, members) if share_prefix else _separate(batch, members) for members in groups]
    bins = balanced_bins([each.num_tokens for each in trees], max_tokens, multiple_of)
    sampled = _sampled_by_sequence(batch)
    return [_Builder(batch, sampled).build([trees[i] for i in sorted(indexes)]) for indexes in bins]


def _sampled_by_sequence(batch: Batch) -> list[Tensor]:
    by_sequence = torch.argsort(batch.sequence, stable=True)
    borders = torch.searchsorted(batch.sequence[by_sequence], torch.arange(batch.num_sequences + 1)).tolist()
    return [by_sequence[start:end] for start, end in pairwise(borders)]


def _separate(batch: Batch, sequences: Sequence[int]) -> PrefixTrees:
    lengths = batch.cu_seqlens.diff()[list(sequences)].numpy()
    return PrefixTrees([[s] for s in sequences], lengths, np.zeros(len(sequences) - 1, dtype=np.int64))


def _sort(batch: Batch, sequences: Sequence[int]) -> PrefixTrees:
    """Find the trees; sequences with images share nothing."""
    tokens, borders = batch.tokens.numpy(), batch.cu_seqlens.tolist()
    rows = {s: tokens[borders[s] : borders[s + 1]] for s in sequences}
    order = sorted(rows, key=lambda s: rows[s].astype(">u4").tobytes())
    leaves, common = list[list[int]]([[order[0]]]), list[int]()
    for previous, s in pairwise(order):
        has_images = bool(batch.images) and bool(batch.images[previous] or batch.images[s])
        shared = 0 if has_images else common_len(rows[previous], rows[s])
        if shared == len(rows[previous]):
            leaves[-1].append(s)
            continue
        leaves.append([s])
        common.append(shared)
    lengths = np.array([len(rows[leaf[-1]]) for leaf in leaves], dtype=np.int64)
    return PrefixTrees(leaves, lengths, _drop_short_blocks(np.array(common, dtype=np.int64)))


def common_len(a: IntArray, b: IntArray) -> int:
    """Return how many tokens two sequences share from their start."""
    length = min(len(a), len(b))
    differing = a[:length] != b[:length]
    return int(differing.argmax()) if differing.any() else length


def _drop_short_blocks(common: IntArray) -> IntArray:
    """Shorten what neighbours share, so that no block has fewer than `MIN_BLOCK_TOKENS` tokens."""
    result = common.copy()
    open_runs = [(0, len(common), 0)]
    while open_runs:
        start, end, depth = open_runs.pop()
        if start >= end:
            continue
        lowest = common[start:end].min()
        border = int(lowest) if lowest - depth >= MIN_BLOCK_TOKENS else depth
        cuts = start + np.flatnonzero(common[start:end] == lowest)
        result[cuts] = border
        open_runs += [(a + 1, b, border) for a, b in pairwise([start - 1, *cuts.tolist(), end])]
    return result


class _Builder:
    """Blocks of one micro-batch."""

    def __init__(self, batch: Batch, sampled: Sequence[Tensor]) -> None:
        self._batch = batch
        self._starts = batch.cu_seqlens.tolist()
        self._sampled = sampled
        self._blocks: list[Tensor] = []
        self._parents: list[int] = []
        self._positions: list[Tensor] = []
        self._index: list[Tensor] = []
        self._images: list[PromptImage] = []
        self._num_tokens = 0

    def build(self, trees: Sequence[PrefixTrees]) -> MicroBatch:
        for each in trees:
            self._add(each)
        indexes = torch.cat(self._index)
        temperatures = self._batch.temperatures
        return MicroBatch(
            tokens=torch.cat(self._blocks),
            cu_seqlens=torch.tensor([0, *(len(block) for block in self._blocks)]).cumsum(0),
            positions=torch.cat(self._positions),
            index=indexes,
            temperatures=None if temperatures is None else temperatures[indexes],
            images=tuple(self._images),
            parents=torch.tensor(self._parents) if max(self._parents) >= 0 else None,
        )

    def _add(self, trees: PrefixTrees) -> None:
        open_runs = [(0, len(trees.leaves), -1, torch.zeros(0, dtype=torch.int64))]  # rows of the path to the parent
        while open_runs:
            start, end, parent, rows = open_runs.pop()
            leaf = trees.leaves[start]
            if end - start == 1:
                self._add_leaf(leaf, parent, rows)
                continue
            common = trees.common[start : end - 1]
            lowest = int(common.min())
            if lowest > len(rows):
                parent, rows = self._add_block(leaf[-1], lowest, parent, rows)
            cuts = start + 1 + np.flatnonzero(common == lowest)
            open_runs += [(a, b, parent, rows) for a, b in pairwise([start, *cuts.tolist(), end])][::-1]

    def _add_block(self, s: int, end: int, parent: int, rows: Tensor) -> tuple[int, Tensor]:
        start = self._starts[s]
        block = self._batch.tokens[start + len(rows) : start + end]
        rows = torch.cat([rows, torch.arange(self._num_tokens, self._num_tokens + len(block))])
        self._blocks.append(block)
        self._parents.append(parent)
        self._num_tokens += len(block)
        return len(self._blocks) - 1, rows

    def _add_leaf(self, leaf: list[int], parent: int, rows: Tensor) -> None:
        longest = leaf[-1]
        if self._batch.images:
            shift = self._num_tokens - len(rows)
            self._images += [structs.replace(image, start=image.start + shift) for image in self._batch.images[longest]]
        _, rows = self._add_block(longest, self._starts[longest + 1] - self._starts[longest], parent, rows)
        for s in leaf:
            self._positions.append(rows[self._batch.positions[self._sampled[s]] - self._starts[s]])
            self._index.append(self._sampled[s])
