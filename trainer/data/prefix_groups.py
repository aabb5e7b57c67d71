"""Micro-batches of prefix groups: sequences of a group with a common unsampled prefix."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from msgspec import structs
from torch import Tensor

from offbeat.services.messages.types import PromptImage
from offbeat.trainer.data.batch import Batch, MicroBatch, balanced_bins, sequences_by_group

MIN_PREFIX_TOKENS = 8


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Sequences and the length of their common prefix, 0 for one."""

    sequences: list[int]
    common: int
    num_tokens: int
    """The prefix counts once."""


def shared_microbatches(
    batch: Batch, sequences: Sequence[int], max_tokens: int, *, multiple_of: int = 1
) -> list[MicroBatch]:
    """Pack like `microbatches`, keeping prefix groups together unless too large."""
    sampled = _sampled_indexes(batch)
    prefix_groups = _prefix_groups(batch, sequences, sampled, max_tokens)
    bins = balanced_bins([prefix_group.num_tokens for prefix_group in prefix_groups], max_tokens, multiple_of)
    return [_build_micro_batch(batch, sampled, [prefix_groups[i] for i in sorted(indexes)]) for indexes in bins]


def whole_group_microbatches(
    batch: Batch, sequences: Sequence[int], max_tokens: int, *, share_prefix: bool, multiple_of: int = 1
) -> list[MicroBatch]:
    """Pack like `microbatches`, without dividing groups; one that is too large is alone.

    share_prefix: compute a group's common prefix once.
    """
    sampled, lengths = _sampled_indexes(batch), batch.cu_seqlens.diff().tolist()
    chosen = set(sequences)
    units: list[PrefixGroup] = []
    for members in sequences_by_group(batch):
        if members[0] not in chosen:
            continue
        common = _common_prefix_len(batch, members, sampled) if share_prefix else 0
        common = common if common >= MIN_PREFIX_TOKENS else 0
        total = sum(lengths[s] for s in members) - common * (len(members) - 1)
        units.append(PrefixGroup(members, common, total))
    bins = balanced_bins([unit.num_tokens for unit in units], max_tokens, multiple_of)
    return [_build_micro_batch(batch, sampled, [units[i] for i in sorted(indexes)]) for indexes in bins]


def _sampled_indexes(batch: Batch) -> list[Tensor]:
    by_sequence = torch.argsort(batch.sequence, stable=True)
    borders = torch.searchsorted(batch.sequence[by_sequence], torch.arange(batch.num_sequences + 1)).tolist()
    return [by_sequence[start:end] for start, end in pairwise(borders)]


def _prefix_groups(
    batch: Batch, sequences: Sequence[int], sampled: Sequence[Tensor], max_tokens: int
) -> list[PrefixGroup]:
    lengths = batch.cu_seqlens.diff().tolist()
    siblings: dict[int, list[int]] = {}
    for s in sequences:
        siblings.setdefault(int(batch.group[batch.trajectory[sampled[s][0]]]), []).append(s)
    prefix_groups: list[PrefixGroup] = []
    for members in siblings.values():
        common = _common_prefix_len(batch, members, sampled)
        if common < MIN_PREFIX_TOKENS:
            prefix_groups += [PrefixGroup([s], 0, lengths[s]) for s in members]
            continue
        prefix_groups += _split(members, common, lengths, max_tokens)
    return prefix_groups


def _common_prefix_len(batch: Batch, members: Sequence[int], sampled: Sequence[Tensor]) -> int:
    """Return the length of the unsampled common prefix; 0 with images."""
    if len(members) < 2 or (batch.images and any(batch.images[s] for s in members)):
        return 0
    starts = batch.cu_seqlens[:-1][members]
    first = min(int(batch.positions[sampled[s][0]] - start) for s, start in zip(members, starts, strict=True))
    prefixes = torch.stack([batch.tokens[start : start + first] for start in starts.tolist()])
    is_equal = (prefixes == prefixes[0]).all(0)
    return first if bool(is_equal.all()) else int(is_equal.long().argmin())


def _split(members: Sequence[int], common: int, lengths: Sequence[int], max_tokens: int) -> list[PrefixGroup]:
    parts: list[PrefixGroup] = []
    part, total = list[int](), common
    for s in sorted(members, key=lambda s: lengths[s]):
        suffix_len = lengths[s] - common
        if part and total + suffix_len > max_tokens:
            parts.append(_make_group(part, common, total))
            part, total = [], common
        part.append(s)
        total += suffix_len
    return [*parts, _make_group(part, common, total)]


def _make_group(members: list[int], common: int, total: int) -> PrefixGroup:
    return PrefixGroup(members, common if len(members) > 1 else 0, total)


def _build_micro_batch(batch: Batch, sampled: Sequence[Tensor], prefix_groups: Sequence[PrefixGroup]) -> MicroBatch:
    starts, ends = batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist()
    pieces: list[Tensor] = []
    parents: list[int] = []
    images: list[PromptImage] = []
    positions: list[Tensor] = []
    index: list[Tensor] = []
    row = 0

    def add(piece: Tensor, parent: int) -> None:
        nonlocal row
        pieces.append(piece)
        parents.append(parent)
        row += len(piece)

    for prefix_group in prefix_groups:
        root = len(pieces) if prefix_group.common else -1
        if prefix_group.common:
            start = starts[prefix_group.sequences[0]]
            add(batch.tokens[start : start + prefix_group.common], -1)
        for s in prefix_group.sequences:
            begin = starts[s] + prefix_group.common
            positions.append(batch.positions[sampled[s]] - begin + row)
            index.append(sampled[s])
            if batch.images:
                images += [structs.replace(image, start=image.start + row) for image in batch.images[s]]
            add(batch.tokens[begin : ends[s]], root)
    indexes = torch.cat(index)
    return MicroBatch(
        tokens=torch.cat(pieces),
        cu_seqlens=torch.tensor([0, *(len(piece) for piece in pieces)]).cumsum(0),
        positions=torch.cat(positions),
        index=indexes,
        temperatures=None if batch.temperatures is None else batch.temperatures[indexes],
        images=tuple(images),
        parents=torch.tensor(parents) if max(parents) >= 0 else None,
    )
