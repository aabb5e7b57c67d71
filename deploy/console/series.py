"""Metrics of `metrics.jsonl` as columns: `source/name`, evaluations as `eval-<sampling>/name`.

Invariant: a step that a later learner repeated counts once, with its last values.
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


class _Column:
    """Points of a metric, by each axis."""

    def __init__(self) -> None:
        self.axes: dict[Axis, array[float]] = {"step": array("d"), "time": array("d"), "trajectories": array("d")}
        self.values = array("d")

    def add(self, step: float, time: float, trajectories: float, value: float, *, is_stepped: bool) -> None:
        while is_stepped and self.values and self.axes["step"][-1] >= step:
            self._pop()
        for axis, place in zip(self.axes.values(), (step, time, trajectories), strict=True):
            axis.append(place)
        self.values.append(value)

    def _pop(self) -> None:
        self.values.pop()
        for axis in self.axes.values():
            axis.pop()

    def points(self, axis: Axis, since: float | None, count: int) -> SeriesColumns:
        start = 0 if since is None else bisect_left(self.axes[axis], since)
        values = np.asarray(self.values[start:])
        kept = keep_extremes(values, count)
        x = np.asarray(self.axes[axis][start:])[kept]
        return SeriesColumns(x=x.tolist(), values=values[kept].tolist(), total=len(values))


class SeriesIndex:
    def __init__(self, folder: Path) -> None:
        self._tail = JsonLinesTail(folder / METRICS_FILE)
        self._clear()

    def _clear(self) -> None:
        self._columns: dict[str, _Column] = {}
        self._newest_id = (0, 0)
        self._step = 0.0
        self._trajectories: list[tuple[float, float]] = [(0.0, 0.0)]
        """Step and trajectories trained up to it, ascending in step."""

    def refresh(self) -> None:
        if self._tail.restarted():
            self._clear()
        for row in self._tail.read():
            self._add(row)

    @property
    def names(self) -> list[str]:
        return sorted(self._columns)

    @property
    def last(self) -> dict[str, float | None]:
        return {name: self._columns[name].values[-1] if self._columns[name].values else None for name in self.names}

    def view(self, names: Sequence[str], axis: Axis, since: float | None, points: int) -> SeriesView:
        series = {
            name: self._columns[name].points(axis, since, points)
            for name in dict.fromkeys(names)
            if name in self._columns
        }
        return SeriesView(axis=axis, series=series, names=self.names, last=self.last)

    def _add(self, row: dict[str, Any]) -> None:
        try:
            entry_id = tuple(map(int, str(row["id"]).split("-")))
            source, step, time = str(row["source"]), row["step"], float(row["time"])
            values, labels = row["values"], row.get("labels") or {}
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
        trained = self._trained_by(place)
        for name, value in values.items():
            if value is not None:
                column = self._columns.setdefault(f"{prefix}/{name}", _Column())
                column.add(place, time, trained, float(value), is_stepped=is_stepped)

    def _count_trajectories(self, step: float, trajectories: float) -> None:
        while len(self._trajectories) > 1 and self._trajectories[-1][0] >= step:
            self._trajectories.pop()
        self._step = step
        self._trajectories.append((step, self._trajectories[-1][1] + trajectories))

    def _trained_by(self, step: float) -> float:
        if self._trajectories[-1][0] <= step:
            return self._trajectories[-1][1]
        return self._trajectories[bisect_left(self._trajectories, (step, float("inf"))) - 1][1]
