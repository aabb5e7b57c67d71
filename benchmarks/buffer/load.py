"""Load and results of `offbeat bench buffer`."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from offbeat.services.buffer.scripts import group_id_of
from offbeat.services.messages.codec import encode_trajectory
from offbeat.services.messages.types import (
    Segment,
    StopReason,
    Trajectory,
    Turn,
    VersionSpan,
)

RUN = "bench-buffer"
TURNS = 5
ANSWER = 4
WORDS = ("You walk on a lake.", *("Row 1: S . # ." if i % 2 == 0 else "right" for i in range(2 * TURNS + 1)))


@dataclass(frozen=True, slots=True)
class GroupLoad:
    trajectories: list[list[Trajectory]]
    blobs: list[list[bytes]]
    in_hand: int
    batch: int
    """Groups acknowledged together; divides their number."""

    @property
    def num_groups(self) -> int:
        return len(self.blobs)

    @property
    def group_size(self) -> int:
        return len(self.blobs[0])

    def first(self, groups: int) -> "GroupLoad":
        return GroupLoad(self.trajectories[:groups], self.blobs[:groups], self.in_hand, self.batch)


@dataclass(frozen=True, slots=True)
class Rates:
    """Groups/s of one round."""

    into: float
    out: float
    cpu_us: float | None = None
    """Per trajectory, client and server, if measured."""

    @property
    def both(self) -> float:
        """Return the rate of in and out in succession."""
        return 1 / (1 / self.into + 1 / self.out)


Side = Callable[[GroupLoad], Rates]


class LostError(Exception):
    """Output that differs from the input."""


def make_load(*, groups: int, group_size: int, tokens: int, in_hand: int, batch: int) -> GroupLoad:
    rows = [[_trajectory(number, index, tokens) for index in range(group_size)] for number in range(groups)]
    return GroupLoad(rows, [[encode_trajectory(trajectory) for trajectory in row] for row in rows], in_hand, batch)


def expect(count: int, expected: int, unit: str) -> None:
    if count != expected:
        raise LostError(f"{count} {unit} came out of {expected}")


def _trajectory(number: int, index: int, tokens: int) -> Trajectory:
    rng = np.random.default_rng((number, index))
    ends = [(turn + 1) * tokens // TURNS for turn in range(TURNS)]
    mask = np.zeros(tokens, dtype=np.bool_)
    for end in ends:
        mask[end - ANSWER : end] = True
    segment = Segment(
        tokens=rng.integers(0, 50_000, tokens).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.random(tokens), 0.0).astype(np.float32),
        versions=tuple(VersionSpan(end - ANSWER, end, 0) for end in ends),
    )
    return Trajectory(
        group_id=group_id_of(RUN, number),
        index=index,
        attempt=0,
        tag="FrozenLake",
        seed=number,
        segments=(segment,),
        turns=tuple(Turn(0, end - ANSWER, end, 0.0, f"{number:08x}{end:08x}") for end in ends),
        stop_reason=StopReason.TERMINATED,
        metrics={"success": 1.0, "action_is_valid": 1.0},
        worker_id="worker",
        duration_s=1.0,
        text=WORDS,
    )
