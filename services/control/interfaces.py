"""What the reconciler asks of the parts of a run, whatever they are made of.

Invariant: `ensure` and `stop` may be called again at any time, by any control replica, and change nothing that is right
already.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from offbeat.services.live_settings import Settings


class Health(StrEnum):
    """How a component is."""

    ABSENT = "absent"
    """Not there, and nothing says that it should be: never started, or stopped on purpose."""
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"
    """Was there and is gone, or does not answer: start it again."""
    DONE = "done"
    """Has finished all that it had to do (the learner, after the last step)."""
    BROKEN = "broken"
    """Starting it again would not help."""


@dataclass(frozen=True, slots=True)
class Observation:
    """How a component was when somebody looked."""

    health: Health
    detail: str = ""
    """One clause that a person understands: `exit code 1`, `waits for version 0`."""
    log: str = ""
    """File to read, relative to the run's folder."""
    incident: str = ""
    """Names one death, so that it is counted once however often it is looked at."""


class Component(Protocol):
    """One part of a run."""

    @property
    def name(self) -> str: ...

    async def ensure(self) -> None:
        """Bring it up where it is not; returns as soon as that is under way."""
        ...

    async def stop(self, *, now: bool) -> None:
        """Ask it to end (`now`: without finishing anything); returns as soon as that is under way."""
        ...

    async def observe(self) -> Observation:
        """How it is; answers within a few seconds."""
        ...


class RunMesh(Protocol):
    """All parts of one run."""

    @property
    def components(self) -> Sequence[Component]:
        """In the order in which they are stopped."""
        ...

    async def prepare(self) -> None:
        """Make what must be there before anything starts: the model folder, the buffer's limits."""
        ...

    async def apply_settings(self, settings: Settings, *, paused: bool) -> None:
        """Want as many workers and replicas as `settings` says, and let new episodes begin unless `paused`; what is right
        already is left alone. `ensure` and `observe` go by it from then on."""
        ...

    async def drain(self) -> None:
        """Let no new episode begin."""
        ...

    async def clean_up(self) -> None:
        """Remove what outlives processes, such as weights in shared memory; called when all components are gone."""
        ...
