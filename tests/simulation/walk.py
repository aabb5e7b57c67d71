"""Seeded walks through the protocol: one seed fixes the settings and the whole list of events.

Events that can't happen in the state that they meet do nothing, so any part of a list is a list: a failing one is shortened
by leaving events out.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from redis import Redis

from tests.simulation.actors import NAMES
from tests.simulation.machine import Protocol

NUM_EVENTS = 120
LOSSES_SHARE = 0.6
"""Share of seeds whose Redis loses writes."""


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    arguments: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.arguments))})"


@dataclass(frozen=True, slots=True)
class Settings:
    max_staleness: int
    order: Literal["completion", "admission"]
    losses: bool

    def __str__(self) -> str:
        return f"max_staleness={self.max_staleness} order={self.order} losses={self.losses}"


def _nothing(_walk: random.Random) -> tuple[()]:
    return ()


Draw = Callable[[random.Random], tuple[Any, ...]]

EVENTS: dict[str, tuple[int, Draw]] = {
    "learner_continues": (12, lambda walk: (walk.randint(1, 6),)),
    "submit": (10, lambda walk: (walk.choice(NAMES), walk.randrange(99), walk.randint(0, 1))),
    "claim": (6, lambda walk: (walk.choice(NAMES), walk.randint(1, 7), walk.random() < 0.2)),
    "play_on": (4, lambda walk: (walk.choice(NAMES), walk.randint(0, 3))),
    "fail": (4, lambda walk: (walk.choice(NAMES), walk.randrange(99))),
    "heartbeat": (3, lambda walk: (walk.choice(NAMES),)),
    "submit_again": (2, lambda walk: (walk.randrange(99),)),
    "worker_dies": (2, lambda walk: (walk.choice(NAMES), walk.random() < 0.5)),
    "worker_is_duplicated": (1, lambda walk: (walk.choice(NAMES),)),
    "submit_from_a_worker_thought_dead": (3, lambda walk: (walk.randrange(99), 0)),
    "release": (1, lambda walk: (walk.choice(NAMES),)),
    "acknowledge": (1, _nothing),
    "evaluate": (1, _nothing),
    "learner_crashes": (1, _nothing),
    "learner_is_killed_in_its_checkpoint": (1, lambda walk: (walk.randrange(90),)),
    "learner_is_paused_in_its_checkpoint": (1, lambda walk: (walk.randrange(90),)),
    "a_paused_learner_wakes": (1, _nothing),
    "a_second_learner_waits": (1, _nothing),
    "a_replaced_learner_writes": (2, lambda walk: (walk.randrange(7),)),
    "a_replaced_learner_saves": (1, _nothing),
    "time_jumps": (1, _nothing),
    "ledger_is_copied": (1, lambda walk: (walk.randrange(40),)),
    "redis_is_copied": (2, _nothing),
    "redis_comes_back_at_an_earlier_state": (2, lambda walk: (walk.randrange(99),)),
}
"""Name of a rule -> weight, and its arguments."""
LOSSES = ("redis_is_copied", "redis_comes_back_at_an_earlier_state")
RUNNING = ("acknowledge", "evaluate", "learner_is_killed_in_its_checkpoint", "learner_is_paused_in_its_checkpoint")
"""Events of a learner that has started."""


class SimulationError(AssertionError):
    """A seed under which the protocol breaks a promise."""

    def __init__(self, seed: int, settings: Settings, events: Sequence[Event], cause: BaseException) -> None:
        self.seed, self.events = seed, list(events)
        lines = "\n".join(f"  {event}" for event in events)
        super().__init__(
            f"seed {seed} ({settings}) fails after {len(events)} events: {type(cause).__name__}: {cause}\n{lines}\n"
            f"replay: make simulate ARGS='--seed {seed}'"
        )


def draw(seed: int, num_events: int = NUM_EVENTS) -> tuple[Settings, list[Event]]:
    """Return what a seed stands for."""
    walk = random.Random(seed)
    settings = Settings(
        walk.choice((0, 1, 1, 8)), walk.choice(("completion", "admission")), walk.random() < LOSSES_SHARE
    )
    names = [name for name in EVENTS if settings.losses or name not in LOSSES]
    chosen = walk.choices(names, [EVENTS[name][0] for name in names], k=num_events)
    return settings, [Event(name, EVENTS[name][1](walk)) for name in chosen]


def _can_happen(machine: Protocol, name: str) -> bool:
    if name in RUNNING:
        return not machine.learner.start_up
    match name:
        case "submit_from_a_worker_thought_dead":
            return bool(machine.ghosts)
        case "a_second_learner_waits":
            return machine.is_leased()
        case "a_replaced_learner_writes" | "a_replaced_learner_saves":
            return machine.zombie is not None
        case "a_paused_learner_wakes":
            return bool(machine.paused)
        case _:
            return True


def play(redis: Redis, url: str, settings: Settings, events: Sequence[Event]) -> str:
    """Play events, checking each; then end all faults and see the run finish. Return its counters as text.

    Raises whatever fails.
    """
    attributes = {"redis": redis, "url": url, "max_staleness": settings.max_staleness, "order": settings.order}
    machine = type("OnRedis", (Protocol,), attributes)()
    try:
        for event in events:
            if _can_happen(machine, event.name):
                getattr(machine, event.name)(*event.arguments)
            machine.the_ledger_adds_up()
            machine.versions_only_grow()
            machine.each_member_is_in_one_place()
            machine.no_group_is_trained_twice()
        machine.finish()
        return f"{machine.run.learner.counters()} {machine.durable.lineage}"
    finally:
        machine.clean_up()


def simulate(redis: Redis, url: str, seed: int, *, shorten_s: float = 60.0) -> str:
    """Play a seed; return its result. Raises `SimulationError` with a trace, shortened for `shorten_s`."""
    settings, events = draw(seed)
    failure = _failure(redis, url, settings, events)
    if isinstance(failure, str):
        return failure
    ends_at = time.monotonic() + shorten_s
    for shorter in _shorten(events, lambda part: _failure(redis, url, settings, part), ends_at):
        events, failure = shorter
    raise SimulationError(seed, settings, events, failure) from failure


def _failure(redis: Redis, url: str, settings: Settings, events: Sequence[Event]) -> BaseException | str:
    try:
        return play(redis, url, settings, events)
    except (Exception, pytest.fail.Exception) as error:  # the latter: `pytest.raises` saw nothing raised
        return error


def _shorten(
    events: list[Event], fails: Callable[[Sequence[Event]], BaseException | str], ends_at: float
) -> Iterator[tuple[list[Event], BaseException]]:
    """Yield ever shorter lists that still fail: without a half, a quarter, ... an event."""
    size = len(events) // 2
    while size:
        start = 0
        while start < len(events):
            if time.monotonic() > ends_at:
                return
            part = events[:start] + events[start + size :]
            if isinstance(error := fails(part), BaseException):
                events = part
                yield events, error
            else:
                start += size
        size //= 2
