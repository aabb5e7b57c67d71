"""Interface to a run's folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from offbeat.services.control.console.schemas import (
    Axis,
    FramesView,
    GroupDetailView,
    GroupSort,
    GroupState,
    GroupsView,
    LagsView,
    SeriesView,
    TrajectoryView,
)
from offbeat.services.errors import ControlError


class UnknownGroupError(ControlError):
    """No such group."""


class NotRecordedError(ControlError):
    """The run's folder lacks it; the message says why."""


@dataclass(frozen=True, slots=True)
class GroupQuery:
    """Filters, combined by and."""

    states: Sequence[GroupState] = ()
    """Any of these; empty: any."""
    tag: str | None = None
    step: int | None = None
    min_reward: float | None = None
    """Bounds of the mean over members."""
    max_reward: float | None = None
    sort: GroupSort = GroupSort.NUMBER
    offset: int = 0
    limit: int = 50


class RunArchive(Protocol):
    """Reader of a run's folder; thread-safe and blocking."""

    def groups(self, query: GroupQuery) -> GroupsView: ...

    def lags(self, groups: int, columns: int) -> LagsView:
        """Count the newest consumed groups' lags, in at most `columns` ranges of steps."""
        ...

    def group(self, number: int) -> GroupDetailView:
        """Raises `UnknownGroupError`."""
        ...

    def trajectory(self, number: int, index: int) -> TrajectoryView:
        """Raises `UnknownGroupError`, `NotRecordedError`."""
        ...

    def frames(self, number: int, index: int) -> FramesView:
        """Replay an episode in another process; raises `UnknownGroupError`, `NotRecordedError`."""
        ...

    def series(self, names: Sequence[str], axis: Axis, since: float | None, points: int) -> SeriesView: ...

    def config(self) -> Mapping[str, Any]:
        """Return the configuration as dotted keys; raises `NotRecordedError`."""
        ...
