"""Packing of trajectories into tensors, mini- and micro-batches.

N tokens of S sequences are concatenated without padding. Arrays [M] cover the sampled tokens, by trajectory in sampling
order: entry m is the token at `positions[m]`, predicted one position before. A sequence's first token is never sampled;
tokens after its last sampled one are dropped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs
from torch import Tensor

from offbeat.services.messages.types import (
    Group,
    PromptImage,
    RoutingArray,
    Trajectory,
)
from offbeat.trainer.data.reward_parts import RewardParts, read_reward_parts
from offbeat.trainer.data.seats import split_seats

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed sequences of T trajectories with R turns; a game of several seats is a trajectory per seat.

    int64: tokens [N]; cu_seqlens [S + 1]; positions [M] into tokens; sequence, trajectory, turn (numbered across the
    batch), versions [M]; group, tag (into `tags`) [T]; owner [R], a turn's trajectory; anchor [R], equal for a group's
    turns at the same state, unique without a state hash.

    float32: behavior_logprobs [M]; turn_reward [M], on a turn's last token; episode_reward [T]; score [R], a turn's
    reward; temperatures [M], NaN for the default, None if all are; greedy_reward [G], mean of each group's greedy
    episodes, None if a group has none.

    bool: last [M], a trajectory's last sampled token; truncated [T], by a token limit; cut [T], by any limit instead of
    its end.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    positions: Tensor
    sequence: Tensor
    trajectory: Tensor
    turn: Tensor
    behavior_logprobs: Tensor
    versions: Tensor
    turn_reward: Tensor
    last: Tensor
    episode_reward: Tensor
    group: Tensor
    tag: Tensor
    tags: tuple[str, ...]
    truncated: Tensor
    cut: Tensor
    owner: Tensor
    score: Tensor
    anchor: Tensor
    temperatures: Tensor | None = None
    greedy_reward: Tensor | None = None
    images: tuple[tuple[PromptImage, ...], ...] = ()
    """Per sequence; empty if there are none."""
    reward_parts: RewardParts | None = None
    """Episodes' rewards by reward function."""
    routing: Tensor | None = None
    """Experts that engines chose, [N, layers, top_k] int16, -1 where unknown; None if no token has any."""

    @property
    def last_turn(self) -> Tensor:
        """Mask each trajectory's last turn, [R] bool."""
        return self.owner.diff(append=self.owner.new_full((1,), -1)) != 0

    @property
    def num_trajectories(self) -> int:
        return len(self.episode_reward)

    @property
    def lengths(self) -> Tensor:
        """Return sampled tokens per trajectory, [T] int64."""
        return torch.bincount(self.trajectory, minlength=self.num_trajectories)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_sampled(self) -> int:
        return len(self.positions)

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    def sampled_by(self, version: int) -> Tensor:
        """Mask tokens that, with all earlier ones of their trajectory, `version` sampled, [M] bool."""
        others = (self.versions != version).long().cumsum(0)
        starts = torch.searchsorted(self.trajectory, self.trajectory)
        before = torch.cat([others.new_zeros(1), others])[starts]
        return others == before


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Complete sequences of a batch.

    positions: [m] into tokens; index: [m] into [M] arrays; parents: [s], as in `trainer.models.tree_attention`, then
    cu_seqlens borders blocks.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    positions: Tensor
    index: Tensor
    temperatures: Tensor | None = None
    parents: Tensor | None = None
    images: tuple[PromptImage, ...] = ()
    routing: Tensor | None = None


@dataclass(slots=True)
class _Columns:
    tokens: list[npt.NDArray[np.int32]] = field(default_factory=list[npt.NDArray[np.int32]])
    positions: list[IntArray] = field(default_factory=list[IntArray])
    logprobs: list[npt.NDArray[np.float32]] = field(default_factory=list[npt.NDArray[np.float32]])
    versions: list[npt.NDArray[np.int32]] = field(default_factory=list[npt.NDArray[np.int32]])
    turns: list[IntArray] = field(default_factory=list[IntArray])
    owners: list[int] = field(default_factory=list[int])
    turn_rewards: list[float] = field(default_factory=list[float])
    turn_owners: list[int] = field(default_factory=list[int])
    anchors: list[int] = field(default_factory=list[int])
    states: dict[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])
    images: list[tuple[PromptImage, ...]] = field(default_factory=list[tuple[PromptImage, ...]])
    routing: list[RoutingArray | None] = field(default_factory=list[RoutingArray | None])
    num_tokens: int = 0

    def add(self, owner: int, group: int, trajectory: Trajectory) -> None:
        turn_of = [np.full(len(segment.tokens), -1, dtype=np.int64) for segment in trajectory.segments]
        for turn in trajectory.turns:
            turn_of[turn.segment][turn.start : turn.end] = len(self.turn_rewards)
            self.turn_rewards.append(turn.reward)
            self.turn_owners.append(owner)
            self.anchors.append(self._anchor(group, turn.state_hash))
        for segment, turns in zip(trajectory.segments, turn_of, strict=True):
            sampled = np.flatnonzero(segment.loss_mask)
            if not len(sampled):
                continue
            if sampled[0] == 0 or turns[sampled].min() < 0:
                problem = (
                    "a segment starts with a sampled token" if sampled[0] == 0 else "a sampled token belongs to no turn"
                )
                raise ValueError(f"{trajectory.group_id}/{trajectory.index}: {problem}")
            end = int(sampled[-1]) + 1
            self.tokens.append(segment.tokens[:end])
            self.positions.append(sampled + self.num_tokens)
            self.logprobs.append(segment.logprobs[sampled])
            self.versions.append(segment.token_versions()[sampled])
            self.turns.append(turns[sampled])
            self.owners.append(owner)
            self.images.append(tuple(image for image in segment.images if image.start < end))
            self.routing.append(segment.routing)
            self.num_tokens += end

    def _anchor(self, group: int, state_hash: str) -> int:
        key = (group, state_hash) if state_hash else (-1, str(len(self.anchors)))
        return self.states.setdefault(key, len(self.states))


def pack(groups: Sequence[Group]) -> Batch:
    """Concatenate trajectories; segments without sampled tokens are dropped, seats are groups of their own.

    Raises:
        ValueError: a segment starts with a sampled token, or a sampled token belongs to no turn.
    """
    groups = split_seats(groups)
    columns = _Columns()
    members = [(number, trajectory) for number, group in enumerate(groups) for trajectory in group.trajectories]
    for owner, (number, trajectory) in enumerate(members):
        columns.add(owner, number, trajectory)
    counts = np.array([len(part) for part in columns.positions], dtype=np.int64)
    turns = _ints(columns.turns)
    order = np.argsort(turns, kind="stable")
    turn = turns[order]
    trajectory_of = np.repeat(np.array(columns.owners, dtype=np.int64), counts)[order]
    lengths = [len(part) for part in columns.tokens]
    tags = sorted({trajectory.tag for _, trajectory in members})
    temperatures = [groups[number].temperature for number, _ in members]
    return Batch(
        tokens=torch.from_numpy(_ints(columns.tokens)),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int64),
        positions=torch.from_numpy(_ints(columns.positions)[order]),
        sequence=torch.from_numpy(np.repeat(np.arange(len(counts)), counts)[order]),
        trajectory=torch.from_numpy(trajectory_of),
        turn=torch.from_numpy(turn),
        behavior_logprobs=torch.from_numpy(_floats(columns.logprobs)[order]),
        versions=torch.from_numpy(_ints(columns.versions)[order]),
        turn_reward=torch.from_numpy(_place_rewards(turn, trajectory_of, columns)),
        last=torch.from_numpy(np.diff(trajectory_of, append=-1) != 0),
        episode_reward=torch.tensor([trajectory.reward for _, trajectory in members], dtype=torch.float32),
        group=torch.tensor([number for number, _ in members], dtype=torch.int64),
        tag=torch.tensor([tags.index(trajectory.tag) for _, trajectory in members], dtype=torch.int64),
        tags=tuple(tags),
        truncated=torch.tensor([t.is_truncated for _, t in members], dtype=torch.bool),
        cut=torch.tensor([t.is_cut for _, t in members], dtype=torch.bool),
        owner=torch.tensor(columns.turn_owners, dtype=torch.int64),
        score=torch.tensor(columns.turn_rewards, dtype=torch.float32),
        anchor=torch.tensor(columns.anchors, dtype=torch.int64),
        temperatures=_token_temperatures(temperatures, trajectory_of),
        images=tuple(columns.images) if any(columns.images) else (),
        greedy_reward=_greedy_rewards(groups),
        reward_parts=read_reward_parts([trajectory for _, trajectory in members]),
        routing=_pack_routing(columns.routing, lengths),
    )


def _pack_routing(parts: Sequence[RoutingArray | None], lengths: Sequence[int]) -> Tensor | None:
    shapes = {part.shape[1:] for part in parts if part is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(f"experts of several models: [layers, top_k] is one of {sorted(shapes)}")
    rows = np.full((sum(lengths), *shapes.pop()), -1, dtype=np.int16)
    start = 0
    for part, length in zip(parts, lengths, strict=True):
        if part is not None:
            known = part[:length]
            rows[start : start + len(known)] = known
        start += length
    return torch.from_numpy(rows)


def _greedy_rewards(groups: Sequence[Group]) -> Tensor | None:
    if not all(group.baselines for group in groups):
        return None
    means = [fmean(trajectory.reward for trajectory in group.baselines) for group in groups]
    return torch.tensor(means, dtype=torch.float32)


def _token_temperatures(temperatures: Sequence[float | None], trajectory: IntArray) -> Tensor | None:
    if all(temperature is None for temperature in temperatures):
        return None
    values = np.array([math.nan if value is None else value for value in temperatures], dtype=np.float32)
    return torch.from_numpy(values[trajectory])


def _place_rewards(turn: IntArray, trajectory: IntArray, columns: _Columns) -> npt.NDArray[np.float32]:
    """Put each turn's reward on its last sampled token, else on the one before the turn, else after it, [M].

    turn, trajectory: [M], ascending
    """
    owners = np.array(columns.turn_owners, dtype=np.int64)
    index = np.searchsorted(turn, np.arange(len(owners)), side="right") - 1
    first, end = np.searchsorted(trajectory, owners, side="left"), np.searchsorted(trajectory, owners, side="right")
    has_tokens = end > first
    index = np.maximum(index, first)[has_tokens]
    rewards = np.array(columns.turn_rewards, dtype=np.float64)[has_tokens]
    return np.bincount(index, weights=rewards, minlength=len(turn)).astype(np.float32)


def _ints(parts: Sequence[npt.NDArray[np.integer[Any]]]) -> IntArray:
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)


def _floats(parts: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)


def minibatches(batch: Batch, count: int) -> list[list[int]]:
    """Split the sequences into at most `count` parts, balanced in number and length."""
    by_length = torch.argsort(batch.cu_seqlens.diff(), descending=True, stable=True).tolist()
    parts: list[list[int]] = [[] for _ in range(min(count, batch.num_sequences))]
    for rank, sequence in enumerate(by_length):
        pass_index, k = divmod(rank, len(parts))
        parts[k if pass_index % 2 == 0 else -1 - k].append(sequence)
    return [sorted(part) for part in parts]


def sequences_by_group(batch: Batch) -> list[list[int]]:
    """Return each group's sequences with sampled tokens."""
    group_of = torch.zeros(batch.num_sequences, dtype=torch.int64)
    group_of[batch.sequence] = batch.group[batch.trajectory]
    members: dict[int, list[int]] = {}
    for sequence, group in enumerate(group_of.tolist()):
        members.setdefault(group, []).append(sequence)
    return [members[group] for group in sorted(members)]


def group_minibatches(batch: Batch, count: int) -> list[list[int]]:
    """Split the sequences into at most `count` parts of whole groups, in order and balanced in number."""
    groups = sequences_by_group(batch)
    parts: list[list[int]] = [[] for _ in range(min(count, len(groups)))]
    for i, members in enumerate(groups):
        parts[i * len(parts) // len(groups)] += members
    return parts


def microbatches(batch: Batch, sequences: Sequence[int], max_tokens: int, *, multiple_of: int = 1) -> list[MicroBatch]:
    lengths = batch.cu_seqlens.diff().tolist()
    bins = balanced_bins([lengths[s] for s in sequences], max_tokens, multiple_of)
    by_sequence = torch.argsort(batch.sequence, stable=True)
    borders = torch.searchsorted(batch.sequence[by_sequence], torch.arange(batch.num_sequences + 1)).tolist()
    sampled = [by_sequence[start:end] for start, end in pairwise(borders)]
    return [_micro(batch, sampled, sorted(sequences[i] for i in members)) for members in bins]


def _micro(batch: Batch, sampled: Sequence[Tensor], sequence_ids: Sequence[int]) -> MicroBatch:
    starts = batch.cu_seqlens[:-1][sequence_ids]
    ends = batch.cu_seqlens[1:][sequence_ids]
    borders = torch.cat([starts.new_zeros(1), (ends - starts).cumsum(0)])
    index = torch.cat([sampled[s] for s in sequence_ids])
    shift = (borders[:-1] - starts).repeat_interleave(torch.tensor([len(sampled[s]) for s in sequence_ids]))
    parts = list(zip(starts.tolist(), ends.tolist(), strict=True))
    return MicroBatch(
        tokens=torch.cat([batch.tokens[a:b] for a, b in parts]),
        cu_seqlens=borders,
        positions=batch.positions[index] + shift,
        index=index,
        temperatures=None if batch.temperatures is None else batch.temperatures[index],
        images=_images(batch, sequence_ids, borders.tolist()),
        routing=None if batch.routing is None else torch.cat([batch.routing[a:b] for a, b in parts]),
    )


def _images(batch: Batch, sequence_ids: Sequence[int], borders: Sequence[int]) -> tuple[PromptImage, ...]:
    if not batch.images:
        return ()
    shifted = zip(sequence_ids, borders[:-1], strict=True)
    return tuple(structs.replace(p, start=p.start + shift) for s, shift in shifted for p in batch.images[s])


def balanced_bins(lengths: Sequence[int], budget: int, multiple_of: int = 1) -> list[list[int]]:
    """Divide the indexes of `lengths` into the fewest bins of at most `budget` in sum, similar lengths together.

    A longer one is alone; the number of bins is a multiple of `multiple_of` if there are enough sequences.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    min_bins = len(_fill(order, lengths, budget))
    num_bins = min(-(-min_bins // multiple_of) * multiple_of, len(order))
    low, high = 1, budget
    while low < high:
        middle = (low + high) // 2
        if len(_fill(order, lengths, middle)) <= num_bins:
            high = middle
        else:
            low = middle + 1
    bins = _fill(order, lengths, high)
    while len(bins) < num_bins:
        _split_largest(bins, lengths)
    return bins


def _fill(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    filled = 0
    for i in order:
        if not bins or filled + lengths[i] > capacity:
            bins.append([])
            filled = 0
        bins[-1].append(i)
        filled += lengths[i]
    return bins


def _split_largest(bins: list[list[int]], lengths: Sequence[int]) -> None:
    divisible = [k for k, members in enumerate(bins) if len(members) > 1]
    fullest = max(divisible, key=lambda k: sum(lengths[i] for i in bins[k]))
    members = bins[fullest]
    bins[fullest : fullest + 1] = [members[: len(members) // 2], members[len(members) // 2 :]]
