from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat.services.messages.types import PromptImage
from offbeat.trainer.models.distillation import Distillation, TopQuery
from offbeat.trainer.models.divergence import ReferenceStates
from offbeat.trainer.models.tree_attention import TreeLayout

MAX_PADDED_PAIRS = 8192
"""Pairs of tokens that a bucket computes for padding; another bucket's calls cost about as much as these."""


@dataclass(frozen=True, slots=True)
class SequenceShard:
    """Part of a row's N tokens that one of a group of ranks computes.

    lengths: tokens of each rank, in their order, at least one; padding follows fewer tokens than ranks.
    """

    group: Any
    rank: int
    num_tokens: int
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, group: Any, num_tokens: int) -> "SequenceShard":
        size = group.size()
        padded = max(num_tokens, size)
        lengths = tuple(padded // size + (rank < padded % size) for rank in range(size))
        return cls(group, group.rank(), num_tokens, lengths)

    @property
    def size(self) -> int:
        return len(self.lengths)

    @property
    def start(self) -> int:
        return sum(self.lengths[: self.rank])

    def cut(self, tokens: Tensor) -> Tensor:
        """Return this rank's part, [..., N] -> [..., n]."""
        padded = torch.nn.functional.pad(tokens, (0, sum(self.lengths) - self.num_tokens))
        return padded.narrow(-1, self.start, self.lengths[self.rank])

    def owners(self, index: Tensor) -> Tensor:
        """Return the ranks that compute tokens, [M] int64."""
        ends = torch.tensor(self.lengths, device=index.device).cumsum(0)
        return torch.bucketize(index, ends, right=True)


class LengthBucket(NamedTuple):
    """Sequences that are padded to one length."""

    num_sequences: int
    length: int


@dataclass(frozen=True, slots=True)
class Packing:
    """B sequences (with `tree`, blocks) concatenated into N tokens.

    cu_seqlens: [B + 1] int32, from 0 to N; position_ids: [1, N] int64, from 0 in each sequence; slots: [N] int64, token
    indices in the concatenated buckets, or None if these are the tokens in order; shard: the tokens that this rank
    computes, None for all.
    """

    cu_seqlens: Tensor
    position_ids: Tensor
    slots: Tensor | None
    buckets: tuple[LengthBucket, ...]
    max_len: int
    tree: TreeLayout | None = None
    shard: SequenceShard | None = None

    @property
    def computed_positions(self) -> Tensor:
        """Return the positions of the tokens that this rank computes, [1, n] int64."""
        return self.position_ids if self.shard is None else self.shard.cut(self.position_ids)

    @classmethod
    def of(cls, cu_seqlens: Tensor, parents: Tensor | None = None) -> "Packing":
        """Build from borders [B + 1] int.

        Raises:
            ValueError: borders do not start at 0 or do not increase.
        """
        starts = cu_seqlens.to(torch.int64)
        lengths = starts.diff()
        if len(starts) < 2 or int(starts[0]) != 0 or int(lengths.min()) < 1:
            raise ValueError(f"invalid borders of packed sequences: {starts.tolist()}")
        borders, max_len = starts.to(torch.int32), int(lengths.max())
        if parents is not None:
            tree = TreeLayout.of(starts, parents)
            return cls(borders, tree.position_ids[None], None, (), max_len, tree)
        positions = torch.arange(int(starts[-1]), device=starts.device) - starts[:-1].repeat_interleave(lengths)
        order = lengths.argsort(descending=True, stable=True)
        buckets = _bucket(lengths[order].tolist())
        if len(buckets) == 1 and int(lengths.min()) == max_len:
            return cls(borders, positions[None], None, buckets, max_len)
        padded = torch.tensor([length for count, length in buckets for _ in range(count)], device=starts.device)
        first = torch.empty_like(lengths)
        first[order] = padded.cumsum(0) - padded
        slots = first.repeat_interleave(lengths) + positions
        return cls(borders, positions[None], slots, buckets, max_len)


def _bucket(lengths: Sequence[int]) -> tuple[LengthBucket, ...]:
    """Divide descending lengths, so that padding costs little beside attention itself."""
    buckets: list[LengthBucket] = []
    start, padding = 0, 0
    for end, length in enumerate(lengths):
        padding += lengths[start] ** 2 - length**2
        if padding > MAX_PADDED_PAIRS:
            buckets.append(LengthBucket(end - start, lengths[start]))
            start, padding = end, 0
    return (*buckets, LengthBucket(len(lengths) - start, lengths[start]))


def pad(rows: Tensor, packing: Packing) -> list[Tensor]:
    """Right-pad with zeros: [N, ...] -> [B, L, ...] of each bucket."""
    sizes = [count * length for count, length in packing.buckets]
    if packing.slots is not None:
        rows = rows.new_zeros(sum(sizes), *rows.shape[1:]).index_copy(0, packing.slots, rows)
    return [
        part.view(*bucket, *rows.shape[1:]) for part, bucket in zip(rows.split(sizes), packing.buckets, strict=True)
    ]


def unpad(buckets: Sequence[Tensor], packing: Packing) -> Tensor:
    """Drop the padding: [B, L, ...] of each bucket -> [N, ...]."""
    parts = [part.flatten(0, 1) for part in buckets]
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return rows if packing.slots is None else rows.index_select(0, packing.slots)


@dataclass(frozen=True, slots=True)
class PackedInput:
    """Input of one forward pass.

    tokens: [N] int64; positions: [M] int64, to score, never a sequence's first; temperatures: [M] float32, NaN for the
    default, None if all are; reference: for a full KL; images: in token order; head_alone: detach values from the
    policy; with_next: also return values after `positions`; distillation: for a divergence from teachers; top: return
    the most probable tokens alone; hidden: [1, N, H], of the previous pipeline stage; value_rows: int64, computed tokens
    whose hidden states give values, None for those of `positions`; routing: [N, layers, top_k] int, experts that tokens
    are sent to, -1 where the model's router chooses them.
    """

    tokens: Tensor
    packing: Packing
    positions: Tensor
    temperatures: Tensor | None = None
    reference: ReferenceStates | None = None
    images: tuple[PromptImage, ...] = ()
    head_alone: bool = False
    with_next: bool = False
    distillation: Distillation | None = None
    top: TopQuery | None = None
    hidden: Tensor | None = None
    value_rows: Tensor | None = None
    routing: Tensor | None = None

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        cu_seqlens: Tensor,
        positions: Tensor,
        temperatures: Tensor | None = None,
        images: tuple[PromptImage, ...] = (),
        parents: Tensor | None = None,
    ) -> "PackedInput":
        """Build the input.

        Raises:
            ValueError: invalid borders, or a sequence's first position.
        """
        packing = Packing.of(cu_seqlens, parents)
        if len(tokens) != packing.position_ids.shape[1]:
            raise ValueError(f"{len(tokens)} tokens, but the borders cover {packing.position_ids.shape[1]}")
        if bool((packing.position_ids[0, positions] == 0).any()):
            raise ValueError("no logit predicts a sequence's first token")
        return cls(tokens, packing, positions, temperatures, images=images)

    @property
    def valued(self) -> Tensor:
        """Return the tokens whose hidden states give values, [M], or with the next ones, [2 M] int64."""
        if self.value_rows is not None:
            return self.value_rows
        return torch.cat([self.predictors, self.positions]) if self.with_next else self.predictors

    @property
    def predictors(self) -> Tensor:
        """Tokens that predict `positions`, of those that this rank computes, [M] int64."""
        tree, shard = self.packing.tree, self.packing.shard
        tokens = self.positions - 1 if tree is None else tree.before[self.positions]
        return tokens if shard is None else tokens - shard.start

    @property
    def computed_tokens(self) -> Tensor:
        """Return the tokens that this rank computes, [n] int64."""
        return self.tokens if self.packing.shard is None else self.packing.shard.cut(self.tokens)

    def to(self, device: torch.device) -> "PackedInput":
        if self.tokens.device == device:
            return self
        packing = replace(
            self.packing,
            cu_seqlens=self.packing.cu_seqlens.to(device),
            position_ids=self.packing.position_ids.to(device),
            slots=None if self.packing.slots is None else self.packing.slots.to(device),
            tree=None if self.packing.tree is None else self.packing.tree.to(device),
        )
        temperatures = None if self.temperatures is None else self.temperatures.to(device)
        reference = (
            None if self.reference is None else ReferenceStates(self.reference.hidden.to(device), self.reference.head)
        )
        return replace(
            self,
            tokens=self.tokens.to(device),
            packing=packing,
            positions=self.positions.to(device),
            temperatures=temperatures,
            reference=reference,
            distillation=None if self.distillation is None else self.distillation.to(device),
            routing=None if self.routing is None else self.routing.to(device),
            hidden=None if self.hidden is None else self.hidden.to(device),
            value_rows=None if self.value_rows is None else self.value_rows.to(device),
        )
