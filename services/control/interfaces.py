"""Interface of the reconciler to the components of a run.

Invariant: `ensure` and `stop` are idempotent: any control replica may call them at any time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from offbeat.services.live_settings import Settings


class Health(StrEnum):
    """Health of a component."""

    ABSENT = "absent"
    """Not running, and not expected to: never started, or stopped on purpose."""
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"
    """Was there and is gone, or does not answer: start it again."""
    DONE = "done"
    """Finished its work (the learner, after the last step)."""
    BROKEN = "broken"
    """Starting it again would not help."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Observed state of a component."""

    health: Health
    detail: str = ""
    """Detail as a clause: `exit code 1`, `waits for version 0`."""
    log: str = ""
    """File to read, relative to the run's folder."""
    incident: str = ""
    """Names one death, so that it is counted once however often it is looked at."""


class Component(Protocol):
    """One part of a run."""

    @property
    def name(self) -> str: ...

    async def ensure(self) -> None:
        """Start the component unless it is running; return once the start is in progress."""
        ...

    async def stop(self, *, now: bool) -> None:
        """Ask it to end (`now`: without finishing anything); returns as soon as that is under way."""
        ...

    async def observe(self) -> Observation:
        """Return the component's state within a few seconds."""
        ...


class RunMesh(Protocol):
    """All parts of one run."""

    @property
    def components(self) -> Sequence[Component]:
        """Return the components in the order in which they are stopped."""
        ...

    async def prepare(self) -> None:
        """Prepare the model folder and the buffer's limits, before anything starts."""
        ...

    async def apply_settings(self, settings: Settings, *, paused: bool) -> None:
        """Set the numbers of workers and replicas, and allow new episodes unless `paused`; idempotent. `ensure` and
        `observe` use these numbers from then on."""
        ...

    async def drain(self) -> None:
        """Start no new episodes."""
        ...

    async def clean_up(self) -> None:
        """Remove resources that outlive processes, such as weights in shared memory; called once all components are gone."""
        ...
