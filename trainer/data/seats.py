"""Games of several seats as groups per seat, so that a trajectory is compared with those of its own seat."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from offbeat.services.messages.types import Group, Trajectory


def split_seats(groups: Sequence[Group]) -> list[Group]:
    """Return a group for each seat of each group, in order; scores stay with whole groups."""
    return [part for group in groups for part in _split(group)]


def list_members(groups: Sequence[Group]) -> list[tuple[int, Trajectory]]:
    """Return group numbers and trajectories in the order of `pack`."""
    return [(group.number, trajectory) for group in split_seats(groups) for trajectory in group.trajectories]


def reward_deviation(group: Group) -> float:
    """Return the standard deviation of rewards, averaged over seats."""
    parts = _split(group)
    return statistics.fmean(statistics.pstdev([t.reward for t in part.trajectories] or [0.0]) for part in parts)


def take_seat(trajectory: Trajectory, seat: str) -> Trajectory:
    """Return the turns, segments and metrics of a seat; without turns, it has no segments either."""
    turns = [turn for turn, of in zip(trajectory.turns, trajectory.seats, strict=True) if of == seat]
    segments = sorted({turn.segment for turn in turns})
    prefix = f"{seat}/"
    own = {name.removeprefix(prefix): value for name, value in trajectory.metrics.items() if name.startswith(prefix)}
    return structs.replace(
        trajectory,
        segments=tuple(trajectory.segments[segment] for segment in segments),
        turns=tuple(turn._replace(segment=segments.index(turn.segment)) for turn in turns),
        metrics={**trajectory.metrics, **own},
        seats=(seat,) * len(turns),
    )


def _split(group: Group) -> list[Group]:
    members = group.trajectories
    seats = sorted({seat for trajectory in (*members, *group.baselines) for seat in trajectory.seats})
    if len(seats) < 2:
        return [group]
    return [
        replace(
            group,
            trajectories=tuple(part for each in members if (part := take_seat(each, seat)).turns),
            baselines=tuple(take_seat(each, seat) for each in group.baselines),
        )
        for seat in seats
    ]
