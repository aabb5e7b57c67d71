"""Episodes and times of a plan, measured or assumed."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from offbeat.deploy.plan.distributions import ValueDistribution

DRAWN_GROUPS = 64
"""Groups that `draw_episodes` draws at a time."""


class PlannedEpisode(NamedTuple):
    turns: int
    env_s: float
    """Time outside of engines."""


class DrawnGroups(NamedTuple):
    """Fields of `PlannedEpisode`, each [groups, members]."""

    turns: npt.NDArray[np.int64]
    env_s: npt.NDArray[np.float64]


class Workload(Protocol):
    def draw_groups(self, rng: np.random.Generator, count: int, members: int) -> DrawnGroups: ...


@dataclass(frozen=True, slots=True)
class AssumedWorkload:
    """Independent episodes."""

    turns: ValueDistribution
    env_s: ValueDistribution
    """Of a turn."""

    def draw_groups(self, rng: np.random.Generator, count: int, members: int) -> DrawnGroups:
        turns = self.turns.draw_counts(rng, count * members).reshape(count, members)
        return DrawnGroups(turns, _sum_of_turns(rng, self.env_s, turns))


@dataclass(frozen=True)
class MeasuredWorkload:
    """Recorded groups, drawn whole to keep siblings alike.

    Members beyond those recorded are drawn from the group with probability `intraclass_correlation`, else from any group:
    from the group alone, a very long episode would have a second one as long too often.
    """

    groups: Sequence[Sequence[PlannedEpisode]]
    weights: tuple[float, ...] = ()
    """Chance of each group; empty: equal."""
    intraclass_correlation: float = 1.0
    """Intraclass correlation of episodes' times."""

    def draw_groups(self, rng: np.random.Generator, count: int, members: int) -> DrawnGroups:
        drawn = [episode for _ in range(count) for episode in self._draw_group(rng, members)]
        turns, env_s = (np.array(field).reshape(count, members) for field in zip(*drawn, strict=True))
        return DrawnGroups(turns, env_s)

    def _draw_group(self, rng: np.random.Generator, members: int) -> list[PlannedEpisode]:
        recorded = self.groups[self._draw(rng)]
        order = rng.permutation(len(recorded))
        episodes = [recorded[i] for i in order[:members]]
        while len(episodes) < members:
            source = recorded if rng.random() < self.intraclass_correlation else self.groups[self._draw(rng)]
            episodes.append(source[int(rng.integers(len(source)))])
        return episodes

    @cached_property
    def _cumulative(self) -> list[float]:
        return list(accumulate(self.weights))

    def _draw(self, rng: np.random.Generator) -> int:
        if not self.weights:
            return int(rng.integers(len(self.groups)))
        return min(bisect_left(self._cumulative, float(rng.random()) * self._cumulative[-1]), len(self.groups) - 1)


@dataclass(frozen=True, slots=True)
class RetimedWorkload:
    """Episodes of another workload, with other times of the env."""

    episodes: Workload
    env_s: ValueDistribution
    """Of a turn."""

    def draw_groups(self, rng: np.random.Generator, count: int, members: int) -> DrawnGroups:
        turns = self.episodes.draw_groups(rng, count, members).turns
        return DrawnGroups(turns, _sum_of_turns(rng, self.env_s, turns))


def draw_episodes(workload: Workload, rng: np.random.Generator, members: int) -> Iterator[list[PlannedEpisode]]:
    """Yield the episodes of one group after another, without end."""
    while True:
        drawn = workload.draw_groups(rng, DRAWN_GROUPS, members)
        for turns, env_s in zip(drawn.turns.tolist(), drawn.env_s.tolist(), strict=True):
            yield [PlannedEpisode(*episode) for episode in zip(turns, env_s, strict=True)]


def _sum_of_turns(
    rng: np.random.Generator, of_turn: ValueDistribution, turns: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    ends = np.cumsum(turns)
    values = of_turn.draw(rng, int(ends[-1]))
    return np.add.reduceat(values, ends - turns.ravel()).reshape(turns.shape)


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """Seconds of a sampled turn by turns in generation at one replica: linear between points, the last slope beyond."""

    points: tuple[tuple[float, float], ...]

    @classmethod
    def parse(cls, text: str) -> "TurnTimes":
        """Read `0.02` or `1:0.08,16:0.16,64:0.33` (concurrency:seconds); raises ValueError."""
        pairs = [part.split(":") for part in text.split(",")]
        try:
            points = tuple((float(a[0]) if len(a) == 2 else 1.0, float(a[-1])) for a in pairs)
        except ValueError:
            points = ()
        counts = [count for count, _ in points]
        is_pairs = all(len(a) <= 2 for a in pairs) and all(0 < count < inf and 0 <= s < inf for count, s in points)
        if not points or not is_pairs or counts != sorted(set(counts)):
            raise ValueError(f"{text!r} must be seconds, or CONCURRENCY:SECONDS,... with rising concurrency")
        return cls(points)

    @property
    def is_flat(self) -> bool:
        return len({seconds for _, seconds in self.points}) == 1

    @property
    def max_rate(self) -> float:
        """Return one replica's turns/s at unlimited concurrency."""
        if len(self.points) < 2:
            return float("inf")
        (c0, s0), (c1, s1) = self.points[-2:]
        return (c1 - c0) / (s1 - s0) if s1 > s0 else float("inf")

    def seconds(self, concurrency: float) -> float:
        points = self.points
        if len(points) == 1 or concurrency <= points[0][0]:
            return points[0][1]
        at = min(bisect_left(points, (concurrency,)), len(points) - 1)
        (c0, s0), (c1, s1) = points[at - 1], points[at]
        return max(s0 + (s1 - s0) * (concurrency - c0) / (c1 - c0), 0.0)


@dataclass(frozen=True, slots=True)
class Measures:
    """Inputs of a plan; times in seconds."""

    workload: Workload
    turn_s: TurnTimes
    train_fixed_s: float
    train_per_token_s: float
    tokens: float
    """Of a trajectory, prompts included."""
    publish_s: float = 0.0
    """Learner blocked per version."""
    announce_s: float = 0.0
    """Then until admission counts the version."""
    serve_s: float = 0.0
    """Then until the engines serve it."""
    other_s: float = 0.0
    """Rest of a step: checkpoints, records."""
    no_signal: tuple[float, ...] = ()
    """Share of a step's groups without learning signal, of each measured step."""
    env_call_s: float | None = None
    """Of a turn's time outside of engines, in calls of its env, which `WorkerLimits` limit; None: all."""
    worker_s: float = 0.0
    """CPU of an env worker per turn."""
    buffer_s: float = 0.0
    """CPU of Redis per episode."""

    def train_s(self, trajectories: float) -> float:
        return self.train_fixed_s + self.train_per_token_s * self.tokens * trajectories
