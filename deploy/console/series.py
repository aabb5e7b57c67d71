"""Metrics of `metrics.jsonl` as columns: `source/name`, evaluations as `eval-<sampling>/name`.

Invariant: a repeated step counts once, with its last values.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.deploy.console.downsampling import keep_extremes
from offbeat.deploy.console.tail import JsonLinesTail
from offbeat.services.control.console.schemas import Axis, SeriesColumns, SeriesView
from offbeat.trainer.trackers.metrics_file import METRICS_FILE

LEARNER, EVALUATION, COMMAND = "learner", "eval", "command"


class _Places:
    """Rows on each axis; columns refer to them by number."""

    def __init__(self) -> None:
        self.axes: dict[Axis, array[float]] = {"step": array("d"), "time": array("d"), "trajectories": array("d")}

    def add(self, step: float, time: float, trajectories: float) -> int:
        for axis, place in zip(self.axes.values(), (step, time, trajectories), strict=True):
            axis.append(place)
        return len(self.axes["step"]) - 1


class _Column:
    """Points of a metric, ascending."""

    __slots__ = ("rows", "values")

    def __init__(self) -> None:
        self.rows = array("q")
        self.values = array("d")

    def drop_from(self, step: float, steps: "array[float]") -> None:
        while self.rows and steps[self.rows[-1]] >= step:
            self.rows.pop()
            self.values.pop()

    def points(self, axis: "array[float]", since: float | None, count: int) -> SeriesColumns:
        x = np.array(axis)[np.array(self.rows)]
        start = 0 if since is None else int(np.searchsorted(x, since))
        values = np.array(self.values[start:])
        kept = keep_extremes(values, count)
        return SeriesColumns(x=x[start:][kept].tolist(), values=values[kept].tolist(), total=len(values))


class SeriesIndex:
    def __init__(self, folder: Path) -> None:
        self._tail = JsonLinesTail(folder / METRICS_FILE)
        self._clear()

    def _clear(self) -> None:
        self._places = _Places()
        self._columns: dict[str, dict[str, _Column]] = {}
        """By source, then name."""
        self._newest_id = (0, 0)
        self._step = 0.0
        self._trajectories: list[tuple[float, float]] = [(0.0, 0.0)]
        """Step and trajectories trained up to it, ascending."""

    def refresh(self) -> None:
        if self._tail.restarted():
            self._clear()
        for row in self._tail.read():
            self._add(row)

    @property
    def names(self) -> list[str]:
        return sorted(self._named())

    @property
    def last(self) -> dict[str, float | None]:
        return {name: column.values[-1] if column.values else None for name, column in sorted(self._named().items())}

    def view(self, names: Sequence[str], axis: Axis, since: float | None, points: int) -> SeriesView:
        columns, places = self._named(), self._places.axes[axis]
        series = {name: columns[name].points(places, since, points) for name in dict.fromkeys(names) if name in columns}
        return SeriesView(axis=axis, series=series, names=sorted(columns), last=self.last)

    def _named(self) -> dict[str, _Column]:
        return {
            f"{source}/{name}": column for source, columns in self._columns.items() for name, column in columns.items()
        }

    def _add(self, record: dict[str, Any]) -> None:
        try:
            entry_id = tuple(map(int, str(record["id"]).split("-")))
            source, step, time = str(record["source"]), record["step"], float(record["time"])
            values, labels = record["values"], record.get("labels") or {}
        except (KeyError, ValueError, TypeError):
            return
        if entry_id <= self._newest_id or source == COMMAND:
            return  # a learner that woke after its replacement has appended it again
        self._newest_id = entry_id
        is_stepped = step is not None and source in (LEARNER, EVALUATION)
        place = float(step) if step is not None and is_stepped else self._step
        if source == LEARNER and is_stepped:
            self._count_trajectories(place, float(values.get("trajectories") or 0.0))
        prefix = f"{EVALUATION}-{labels.get('sampling', 'sampled')}" if source == EVALUATION else source
        row = self._places.add(place, time, self._trained_by(place))
        columns, steps = self._columns.setdefault(prefix, {}), self._places.axes["step"]
        for name, value in values.items():
            if value is None:
                continue
            column = columns.get(name)
            if column is None:
                column = columns[name] = _Column()
            elif is_stepped and column.rows and steps[column.rows[-1]] >= place:
                column.drop_from(place, steps)
            column.rows.append(row)
            column.values.append(value)

    def _count_trajectories(self, step: float, trajectories: float) -> None:
        while len(self._trajectories) > 1 and self._trajectories[-1][0] >= step:
            self._trajectories.pop()
        self._step = step
        self._trajectories.append((step, self._trajectories[-1][1] + trajectories))

    def _trained_by(self, step: float) -> float:
        if self._trajectories[-1][0] <= step:
            return self._trajectories[-1][1]
        return self._trajectories[bisect_left(self._trajectories, (step, float("inf"))) - 1][1]
