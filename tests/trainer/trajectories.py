"""Trajectories and groups made by hand, for tests of what the trainer makes of them."""

from collections.abc import Sequence

import numpy as np

from offbeat.services.messages.types import (
    Group,
    Segment,
    StopReason,
    Trajectory,
    Turn,
    VersionSpan,
)
from tests.copying import replace

Step = tuple[int, int, float]
"""A turn: tokens of the observation before it, tokens sampled in it, its reward."""


def trajectory(
    index: int,
    steps: Sequence[Step],
    *,
    base: int = 0,
    versions: Sequence[int] = (),
    group_id: str = "g",
    tag: str = "lake",
) -> Trajectory:
    """One segment; token ids count up from `base`; turn k is sampled by `versions[k]`, else by version k."""
    mask: list[bool] = []
    turns: list[Turn] = []
    for prompt, sampled, reward in steps:
        start = len(mask) + prompt
        mask += [False] * prompt + [True] * sampled
        turns.append(Turn(0, start, start + sampled, reward))
    spans = [
        VersionSpan(turn.start, turn.end, versions[k] if versions else k)
        for k, turn in enumerate(turns)
        if turn.end > turn.start
    ]
    tokens = np.arange(base, base + len(mask), dtype=np.int32)
    logprobs = np.where(mask, -0.25 * (index + 1) - 0.01 * np.arange(len(mask)), 0.0).astype(np.float32)
    segment = Segment(tokens, np.array(mask, dtype=np.bool_), logprobs, tuple(spans))
    return Trajectory(group_id, index, 0, tag, 0, (segment,), tuple(turns), StopReason.TERMINATED)


def cut_into_segments(whole: Trajectory) -> Trajectory:
    """The same episode with each turn in a segment of its own that repeats all tokens before it, as a template that rewrites
    its history would give."""
    (segment,) = whole.segments
    segments: list[Segment] = []
    turns: list[Turn] = []
    for turn in whole.turns:
        mask = np.zeros(turn.end, dtype=np.bool_)
        mask[turn.start :] = True
        spans = tuple(span for span in segment.versions if span.start >= turn.start and span.end <= turn.end)
        logprobs = np.where(mask, segment.logprobs[: turn.end], 0).astype(np.float32)
        turns.append(turn._replace(segment=len(segments)))
        segments.append(Segment(segment.tokens[: turn.end], mask, logprobs, spans))
    return replace(whole, segments=tuple(segments), turns=tuple(turns))


def group(number: int, *trajectories: Trajectory, tag: str = "lake") -> Group:
    return Group(f"{number}-0", f"g{number}", number, tag, 0, 0, trajectories)


def two_groups() -> list[Group]:
    """Rewards 1, 0 and -0.1, 0.5; sampled tokens 3, 2 and 1, 4."""
    return [
        group(0, trajectory(0, [(2, 2, 0.0), (1, 1, 1.0)]), trajectory(1, [(3, 2, 0.0)], base=20)),
        group(1, trajectory(0, [(1, 1, -0.1)], base=40), trajectory(1, [(2, 3, 0.5), (2, 1, 0.0)], base=60)),
    ]
