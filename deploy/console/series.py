"""Metrics of `metrics.jsonl` as columns: `source/name`, `source-<kind>/name`, evaluations as `eval-<sampling>/name`.

Invariants: a repeated step counts once, with its last values, also an evaluation that ends after a later one; of
evaluations at a step the last one counts; points ascend in x, as the means of other records at the same x.
"""

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.deploy.console.downsampling import keep_extremes
from offbeat.deploy.console.tail import JsonLinesTail
from offbeat.services.control.console.schemas import Axis, SeriesColumns, SeriesView
from offbeat.services.telemetry import REWOUND_TO
from offbeat.trainer.trackers.metrics_file import METRICS_FILE

LEARNER, EVALUATION, COMMAND = "learner", "eval", "command"
STEPPED = (LEARNER, EVALUATION)
"""Sources whose records have steps, which a later learner may repeat."""


class _Places:
    """Rows on each axis; columns refer to them by number."""

    def __init__(self) -> None:
        self.axes: dict[Axis, array[float]] = {"step": array("d"), "time": array("d"), "trajectories": array("d")}

    def add(self, step: float, time: float, trajectories: float) -> int:
        for axis, place in zip(self.axes.values(), (step, time, trajectories), strict=True):
            axis.append(place)
        return len(self.axes["step"]) - 1


class _Table:
    """Rows of a source that hold the same metrics."""

    __slots__ = ("columns", "rows", "values")

    def __init__(self, names: Sequence[str]) -> None:
        self.columns = {name: column for column, name in enumerate(names)}
        self.rows = array("q")
        self.values = array("d")
        """Row by row."""

    def column(self, name: str) -> NDArray[np.float64]:
        """Return a view, to be left before a row is added."""
        return np.frombuffer(self.values).reshape(len(self.rows), len(self.columns))[:, self.columns[name]]

    def last(self, name: str) -> float:
        return self.values[self.columns[name] - len(self.columns)]


class _Source:
    """Rows of a source, in tables by the names of their metrics: a row of many metrics costs one call."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._rewinds: list[tuple[int, float]] = []
        """Row and step, after which earlier rows are of weights that are given up."""
        self._tables: dict[tuple[str, ...], _Table] = {}

    def add(self, row: int, metrics: Mapping[str, Any]) -> None:
        try:
            values = array("d", metrics.values())
        except TypeError:
            metrics = {name: value for name, value in metrics.items() if isinstance(value, float | int)}
            values = array("d", metrics.values())
        names = tuple(metrics)
        if not names:
            return
        table = self._tables.get(names)
        if table is None:
            table = self._tables[names] = _Table(names)
        table.rows.append(row)
        table.values.extend(values)

    def rewind(self, row: int, step: float) -> None:
        self._rewinds.append((row, step))

    def last(self, steps: "array[float]") -> dict[str, float]:
        """Return the newest value of each metric, an evaluation's that of the newest step."""
        if self.source == EVALUATION:
            names = dict.fromkeys(name for table in self._tables.values() for name in table.columns)
            points = {name: self.points(name, steps)[1] for name in names}
            return {name: float(values[-1]) for name, values in points.items() if len(values)}
        tables = sorted(self._tables.values(), key=lambda table: table.rows[-1])
        return {name: table.last(name) for table in tables for name in table.columns}

    def points(self, name: str, steps: "array[float]") -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return rows and values of a metric, without those of steps that a later learner repeated."""
        tables = [table for table in self._tables.values() if name in table.columns]
        rows = np.concatenate([np.frombuffer(table.rows, dtype=np.int64) for table in tables])
        values = np.concatenate([table.column(name) for table in tables])
        order = np.argsort(rows)
        rows, values = rows[order], values[order]
        x = np.frombuffer(steps)[rows]
        if self.source == EVALUATION:  # several are played at once, and may end in another order
            for row, step in self._rewinds:
                current = (rows > row) | (x <= step)
                rows, values, x = rows[current], values[current], x[current]
            _, newest = np.unique(x[::-1], return_index=True)
            return rows[len(x) - 1 - newest], values[len(x) - 1 - newest]
        # Services have several records per step: a decrease alone shows a later learner
        following = x[1:] if self.source == LEARNER else np.where(x[1:] < x[:-1], x[1:], np.inf)
        kept = x < np.append(np.minimum.accumulate(following[::-1])[::-1], np.inf)
        return rows[kept], values[kept]


class SeriesIndex:
    def __init__(self, folder: Path) -> None:
        self._tail = JsonLinesTail(folder / METRICS_FILE)
        self._clear()

    def _clear(self) -> None:
        self._places = _Places()
        self._sources: dict[str, _Source] = {}
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
    def last(self) -> dict[str, float | None]:
        """Return the newest value of each metric, by name."""
        values = {
            f"{prefix}/{name}": value
            for prefix, source in self._sources.items()
            for name, value in source.last(self._places.axes["step"]).items()
        }
        return dict(sorted(values.items()))

    def view(self, names: Sequence[str], axis: Axis, since: float | None, points: int) -> SeriesView:
        last = self.last
        series = {name: self._points(name, axis, since, points) for name in dict.fromkeys(names) if name in last}
        return SeriesView(axis=axis, series=series, names=list(last), last=last)

    def _points(self, name: str, axis: Axis, since: float | None, count: int) -> SeriesColumns:
        prefix, _, metric = name.partition("/")
        rows, values = self._sources[prefix].points(metric, self._places.axes["step"])
        x, points = np.unique(np.frombuffer(self._places.axes[axis])[rows], return_inverse=True)
        values = np.bincount(points, weights=values) / np.bincount(points)
        start = 0 if since is None else int(np.searchsorted(x, since))
        values = values[start:]
        kept = keep_extremes(values, count)
        return SeriesColumns(x=x[start:][kept].tolist(), values=values[kept].tolist(), total=len(values))

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
        if source == LEARNER and REWOUND_TO in labels:
            evaluated = [each for each in self._sources.values() if each.source == EVALUATION]
            for each in evaluated:
                each.rewind(len(self._places.axes["step"]) - 1, float(labels[REWOUND_TO]))
        is_stepped = step is not None and source in STEPPED
        place = float(step) if step is not None and is_stepped else self._step
        if source == LEARNER and is_stepped:
            self._count_trajectories(place, float(values.get("trajectories") or 0.0))
        prefix = _prefix(source, labels)
        row = self._places.add(place, time, self._trained_by(place))
        if prefix not in self._sources:
            self._sources[prefix] = _Source(source)
        self._sources[prefix].add(row, values)

    def _count_trajectories(self, step: float, trajectories: float) -> None:
        while len(self._trajectories) > 1 and self._trajectories[-1][0] >= step:
            self._trajectories.pop()
        self._step = step
        self._trajectories.append((step, self._trajectories[-1][1] + trajectories))

    def _trained_by(self, step: float) -> float:
        if self._trajectories[-1][0] <= step:
            return self._trajectories[-1][1]
        return self._trajectories[bisect_left(self._trajectories, (step, float("inf"))) - 1][1]


def _prefix(source: str, labels: Mapping[str, str]) -> str:
    kind = labels.get("sampling", "sampled") if source == EVALUATION else labels.get("kind")
    return f"{source}-{kind}" if kind else source
