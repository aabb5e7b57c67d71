"""Groups whose prompts count as learned."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from offbeat.services.messages.types import Group, Segment, Trajectory, Turn, VersionSpan


def with_prompts(groups: Sequence[Group]) -> list[Group]:
    """Return copies in which every token up to the last learned one is learned, except a sequence's first."""
    return [replace(group, trajectories=tuple(map(_widen, group.trajectories))) for group in groups]


def learned_tokens(groups: Sequence[Group]) -> Tensor:
    """Mask the learned tokens of `pack(with_prompts(groups))`, [M] bool."""
    masks = [
        segment.loss_mask[1 : int(np.flatnonzero(segment.loss_mask)[-1]) + 1]
        for group in groups
        for trajectory in group.trajectories
        for segment in trajectory.segments
        if segment.loss_mask.any()
    ]
    return torch.from_numpy(np.concatenate(masks)) if masks else torch.zeros(0, dtype=torch.bool)


def _widen(trajectory: Trajectory) -> Trajectory:
    segments = [_widen_segment(segment) for segment in trajectory.segments]
    turns = [Turn(i, 1, len(segment.tokens), 0.0) for i, segment in enumerate(segments) if segment.loss_mask.any()]
    return structs.replace(trajectory, segments=tuple(segments), turns=tuple(turns))


def _widen_segment(segment: Segment) -> Segment:
    learned = np.flatnonzero(segment.loss_mask)
    if not len(learned):
        return segment
    end = int(learned[-1]) + 1
    mask = np.ones(end, dtype=np.bool_)
    mask[0] = False
    version = segment.versions[-1].version
    return Segment(
        segment.tokens[:end],
        mask,
        np.zeros(end, dtype=np.float32),
        (VersionSpan(1, end, version),),
        tuple(image for image in segment.images if image.start < end),
    )
