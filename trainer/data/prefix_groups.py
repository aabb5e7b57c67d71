"""Which sequences of a batch begin alike, and micro-batches in which that beginning stands once.

A family is sequences of one group (siblings of one task and seed) with the tokens that all of them begin with before any of
them samples one: the common prompt. Invariant: every sequence, with its sampled tokens, is in one family of one micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from offbeat.services.messages.types import Picture
from offbeat.trainer.data.batch import Batch, MicroBatch, balanced_bins

SHORTEST = 8
"""Common tokens that are worth a family."""


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Sequences of a batch and the number of tokens that they have in common, 0 for one that is alone."""

    sequences: list[int]
    common: int
    num_tokens: int
    """That are computed."""


def shared_microbatches(
    batch: Batch, sequences: Sequence[int], max_tokens: int, *, multiple_of: int = 1
) -> list[MicroBatch]:
    """As `batch.microbatches`, of whole families; one that is too large is cut, each part with its beginning."""
    sampled = _sampled(batch)
    families = _families(batch, sequences, sampled, max_tokens)
    bins = balanced_bins([family.num_tokens for family in families], max_tokens, multiple_of)
    return [_micro(batch, sampled, [families[i] for i in sorted(chosen)]) for chosen in bins]


def _sampled(batch: Batch) -> list[Tensor]:
    """Of each sequence, where its sampled tokens stand in [M] arrays."""
    by_sequence = torch.argsort(batch.sequence, stable=True)
    borders = torch.searchsorted(batch.sequence[by_sequence], torch.arange(batch.num_sequences + 1)).tolist()
    return [by_sequence[start:end] for start, end in pairwise(borders)]


def _families(batch: Batch, sequences: Sequence[int], sampled: Sequence[Tensor], most: int) -> list[PrefixGroup]:
    lengths = batch.cu_seqlens.diff().tolist()
    siblings: dict[int, list[int]] = {}
    for s in sequences:
        siblings.setdefault(int(batch.group[batch.trajectory[sampled[s][0]]]), []).append(s)
    families: list[PrefixGroup] = []
    for members in siblings.values():
        common = _common(batch, members, sampled)
        if common < SHORTEST:
            families += [PrefixGroup([s], 0, lengths[s]) for s in members]
            continue
        families += _parts(members, common, lengths, most)
    return families


def _common(batch: Batch, members: Sequence[int], sampled: Sequence[Tensor]) -> int:
    """Tokens that all members begin with, none of them sampled; 0 for one that is alone, or that looks at pictures."""
    if len(members) < 2 or (batch.pictures and any(batch.pictures[s] for s in members)):
        return 0
    starts = batch.cu_seqlens[:-1][members]
    first = min(int(batch.positions[sampled[s][0]] - start) for s, start in zip(members, starts, strict=True))
    beginnings = torch.stack([batch.tokens[start : start + first] for start in starts.tolist()])
    alike = (beginnings == beginnings[0]).all(0)
    return first if bool(alike.all()) else int(alike.long().argmin())


def _parts(members: Sequence[int], common: int, lengths: Sequence[int], most: int) -> list[PrefixGroup]:
    parts: list[PrefixGroup] = []
    chosen, total = list[int](), common
    for s in sorted(members, key=lambda s: lengths[s]):
        own = lengths[s] - common
        if chosen and total + own > most:
            parts.append(_family(chosen, common, total))
            chosen, total = [], common
        chosen.append(s)
        total += own
    return [*parts, _family(chosen, common, total)]


def _family(chosen: list[int], common: int, total: int) -> PrefixGroup:
    return PrefixGroup(chosen, common if len(chosen) > 1 else 0, total)


def _micro(batch: Batch, sampled: Sequence[Tensor], families: Sequence[PrefixGroup]) -> MicroBatch:
    starts, ends = batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist()
    pieces: list[Tensor] = []
    parents: list[int] = []
    pictures: list[Picture] = []
    positions: list[Tensor] = []
    index: list[Tensor] = []
    row = 0

    def add(piece: Tensor, parent: int) -> None:
        nonlocal row
        pieces.append(piece)
        parents.append(parent)
        row += len(piece)

    for family in families:
        root = len(pieces) if family.common else -1
        if family.common:
            start = starts[family.sequences[0]]
            add(batch.tokens[start : start + family.common], -1)
        for s in family.sequences:
            begin = starts[s] + family.common
            positions.append(batch.positions[sampled[s]] - begin + row)
            index.append(sampled[s])
            if batch.pictures:
                pictures += [replace(picture, start=picture.start + row) for picture in batch.pictures[s]]
            add(batch.tokens[begin : ends[s]], root)
    where = torch.cat(index)
    return MicroBatch(
        tokens=torch.cat(pieces),
        cu_seqlens=torch.tensor([0, *(len(piece) for piece in pieces)]).cumsum(0),
        positions=torch.cat(positions),
        index=where,
        temperatures=None if batch.temperatures is None else batch.temperatures[where],
        pictures=tuple(pictures),
        parents=torch.tensor(parents) if max(parents) >= 0 else None,
    )
