"""Interface of the reconciler to a run's components."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from offbeat.services.live_settings import Settings


@dataclass(frozen=True, slots=True)
class Removal:
    """Removed paths, and those left because the run did not write them."""

    removed: list[str]
    left: list[str]


class Health(StrEnum):
    ABSENT = "absent"
    """Never started, or stopped on purpose."""
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"
    """Ended or unresponsive."""
    DONE = "done"
    """Finished (the learner, after the last step)."""
    BROKEN = "broken"
    """A restart would not help."""


@dataclass(frozen=True, slots=True)
class Observation:
    health: Health
    detail: str = ""
    """Clause: `exit code 1`, `waits for version 0`."""
    log: str = ""
    """Log file, relative to the run's folder."""
    incident: str = ""
    """Id of a death."""


class Component(Protocol):
    @property
    def name(self) -> str: ...

    async def ensure(self) -> None:
        """Start unless running, without waiting; idempotent."""
        ...

    async def stop(self, *, now: bool) -> None:
        """Request the end (`now`: without draining), without waiting; idempotent."""
        ...

    async def observe(self) -> Observation:
        """Return the state within a few seconds."""
        ...


class RunMesh(Protocol):
    @property
    def components(self) -> Sequence[Component]:
        """Return the components in stop order."""
        ...

    async def prepare(self) -> None: ...

    async def apply_settings(self, settings: Settings, *, paused: bool) -> None:
        """Apply process numbers, and admit episodes unless `paused`; idempotent."""
        ...

    async def drain(self) -> None:
        """Start no new episodes."""
        ...

    async def clean_up(self) -> None:
        """Free what outlives the components (weights in shared memory)."""
        ...


class Recipes(Protocol):
    """Packaged configurations; blocking."""

    def recipes(self) -> Mapping[str, str]:
        """Return names and what each trains."""
        ...

    def recipe(self, name: str) -> str:
        """Return a recipe as complete YAML."""
        ...
