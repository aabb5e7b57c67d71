"""Conversations of an episode, one per seat.

Invariants: each seat has a context of its own; a reward is on its seat's last turn, or on the first one to come.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

from offbeat.services.errors import EpisodeError
from offbeat.services.messages.types import Segment, Turn
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.envs.runners import StepResult
from offbeat.services.rollout.episodes.history import TurnHistory
from offbeat.services.rollout.episodes.recorder import EpisodeRecorder


class Conversation(NamedTuple):
    recorder: EpisodeRecorder
    history: TurnHistory


class EpisodeRecord(NamedTuple):
    turns: tuple[Turn, ...]
    """In the order of play."""
    segments: tuple[Segment, ...]
    seats: tuple[str, ...]
    """Of the turns; empty without seats."""


class Conversations:
    """Conversations by seat; of an env without seats a single one, of the seat ""."""

    __slots__ = ("_by_seat", "_make_recorder", "_movers", "_rewards", "_rules", "_seats", "_unplaced")

    def __init__(
        self, make_recorder: Callable[[], Awaitable[EpisodeRecorder]], rules: CustomEnv, seats: Sequence[str]
    ) -> None:
        self._seats = tuple(seats) or ("",)
        self._make_recorder = make_recorder
        self._rules = rules
        self._by_seat: dict[str, Conversation] = {}
        self._movers: list[str] = []
        self._rewards: defaultdict[str, list[float]] = defaultdict(list)
        """By turn of the seat."""
        self._unplaced: defaultdict[str, float] = defaultdict(float)
        """Before the seat's first turn."""

    async def of(self, seat: str) -> Conversation:
        """Return a seat's conversation; raises EpisodeError for an unknown one, and as `make_recorder` does."""
        if seat not in self._seats:
            raise EpisodeError("bad_seat", f"the env names {seat!r} to move; its `seats` are {', '.join(self._seats)}")
        if seat not in self._by_seat:
            self._by_seat[seat] = Conversation(await self._make_recorder(), TurnHistory(self._rules))
        return self._by_seat[seat]

    def add_step(self, seat: str, result: StepResult, state_hash: str) -> None:
        """Record what a turn of `seat` earned each seat."""
        self._by_seat[seat].recorder.add_reward(result.reward, state_hash)
        self._movers.append(seat)
        self._rewards[seat].append(self._unplaced.pop(seat, 0.0))
        for name, values in (result.seats or {seat: {"reward": result.reward}}).items():
            reward = values.get("reward", 0.0)
            if self._rewards[name]:
                self._rewards[name][-1] += reward
            else:
                self._unplaced[name] += reward

    def metrics(self) -> dict[str, float]:
        """Return each seat's reward."""
        names = sorted({*self._rewards, *self._unplaced} - {""})
        return {f"{name}/reward": sum(self._rewards[name]) + self._unplaced.get(name, 0.0) for name in names}

    def record(self) -> EpisodeRecord:
        records = {seat: conversation.recorder.record() for seat, conversation in self._by_seat.items()}
        if not any(self._movers):
            return EpisodeRecord(*list(records.values())[-1], ())
        turns: dict[str, Iterator[Turn]] = {}
        segments: list[Segment] = []
        for seat, record in records.items():
            if record.turns:
                start, rewards = len(segments), self._rewards[seat]
                own = zip(record.turns, rewards, strict=True)
                turns[seat] = iter([t._replace(segment=start + t.segment, reward=reward) for t, reward in own])
                segments += record.segments
        return EpisodeRecord(tuple(next(turns[seat]) for seat in self._movers), tuple(segments), tuple(self._movers))


def seat_metrics(result: StepResult) -> dict[str, float]:
    """Return a step's metrics, those of seats as `SEAT/NAME`."""
    own = {
        f"{seat}/{name}": value
        for seat, values in result.seats.items()
        for name, value in values.items()
        if name != "reward"
    }
    return {**result.metrics, **own}
