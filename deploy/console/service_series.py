"""Series of components that write about once a second, in bounded memory.

Invariants: the newest records are kept as they are, older ones in at most `MAX_BUCKETS` buckets of a metric; a step's mean
is exact while there are fewer steps than buckets, and each bucket keeps its smallest and largest value.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.services.control.console.schemas import Axis

Floats = NDArray[np.float64]
MAX_ROWS = 1 << 14
"""Newest records of a source, kept as they are."""
MAX_BUCKETS = 1 << 14
STEP, FIRST, LAST, TRAJECTORIES, COUNT, TOTAL, LOW, HIGH = range(8)
"""Rows of a metric's buckets: place on each axis (FIRST and LAST are times), number of records, sum, extremes."""


class Points(NamedTuple):
    """Sums of values at places, which need not ascend or be unique."""

    x: Floats
    totals: Floats
    counts: Floats


class Places:
    """Rows on each axis; columns refer to them by number."""

    def __init__(self) -> None:
        self.axes: dict[Axis, array[float]] = {"step": array("d"), "time": array("d"), "trajectories": array("d")}

    def __len__(self) -> int:
        return len(self.axes["step"])

    def add(self, step: float, time: float, trajectories: float) -> int:
        for axis, place in zip(self.axes.values(), (step, time, trajectories), strict=True):
            axis.append(place)
        return len(self) - 1


class Table:
    """Rows of a source that hold the same metrics."""

    __slots__ = ("columns", "rows", "values")

    def __init__(self, names: Sequence[str]) -> None:
        self.columns = {name: column for column, name in enumerate(names)}
        self.rows = array("q")
        self.values = array("d")
        """Row by row."""

    def column(self, name: str) -> Floats:
        """Return a view, to be left before a row is added."""
        return np.frombuffer(self.values).reshape(len(self.rows), len(self.columns))[:, self.columns[name]]


class Tables:
    """Rows of a source, in tables by the names of their metrics: a row of many metrics costs one call."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}
        """Newest value of each metric."""
        self._tables: dict[tuple[str, ...], Table] = {}

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
            table = self._tables[names] = Table(names)
        table.rows.append(row)
        table.values.extend(values)
        self.last.update(metrics)

    def names(self) -> set[str]:
        return {name for table in self._tables.values() for name in table.columns}

    def rows(self, name: str) -> tuple[NDArray[np.int64], Floats]:
        """Return the rows and values of a metric, ascending."""
        tables = [table for table in self._tables.values() if name in table.columns]
        if not tables:
            return np.empty(0, dtype=np.int64), np.empty(0)
        rows = np.concatenate([np.frombuffer(table.rows, dtype=np.int64) for table in tables])
        values = np.concatenate([table.column(name) for table in tables])
        order = np.argsort(rows)
        return rows[order], values[order]

    def clear(self) -> None:
        self._tables = {}


class ServiceSeries:
    """Records of a source without steps of its own, placed by the learner's."""

    def __init__(self) -> None:
        self._places = Places()
        self._newest = Tables()
        self._step = 0.0
        self._buckets: dict[str, Floats] = {}
        """Older records, by metric; see `STEP`."""

    @property
    def last(self) -> dict[str, float]:
        """Return the newest value of each metric."""
        return self._newest.last

    def add(self, step: float, time: float, trajectories: float, metrics: Mapping[str, Any]) -> None:
        if step < self._step:  # a later learner repeats steps
            self._merge()
            self._buckets = {name: kept[:, kept[STEP] < step] for name, kept in self._buckets.items()}
        self._step = step
        self._newest.add(self._places.add(step, time, trajectories), metrics)
        if len(self._places) >= MAX_ROWS:
            self._merge()

    def points(self, name: str, axis: Axis) -> Points:
        """Return a metric's points; by time, a bucket is its two extremes."""
        buckets = self._all(name)
        if axis == "time":
            merged = buckets[:, buckets[COUNT] > 1]
            x = np.concatenate([buckets[FIRST], merged[LAST]])
            return Points(x, np.concatenate([buckets[LOW], merged[HIGH]]), np.ones(len(x)))
        return Points(buckets[STEP if axis == "step" else TRAJECTORIES], buckets[TOTAL], buckets[COUNT])

    def _all(self, name: str) -> Floats:
        rows, values = self._newest.rows(name)
        steps, times, trajectories = (np.frombuffer(axis)[rows] for axis in self._places.axes.values())
        newest = np.stack([steps, times, times, trajectories, np.ones(len(rows)), values, values, values])
        earlier = self._buckets.get(name)
        return newest if earlier is None else np.concatenate([earlier, newest], axis=1)

    def _merge(self) -> None:
        """Move the newest records into buckets."""
        self._buckets |= {name: coarsen(self._all(name), MAX_BUCKETS) for name in self._newest.names()}
        self._newest.clear()
        self._places = Places()


def coarsen(buckets: Floats, limit: int) -> Floats:
    """Merge neighbours to at most `limit` buckets of about equal numbers of records; of one step each where they fit."""
    if buckets.shape[1] <= limit:
        return buckets
    ends = np.cumsum(buckets[COUNT])
    numbers = (ends - buckets[COUNT]) // (ends[-1] / (limit // 2))
    by_number, by_step = np.diff(numbers) > 0, np.diff(buckets[STEP]) != 0
    borders = by_number | by_step
    if np.count_nonzero(borders) >= limit:
        borders = by_number
    starts = np.append(0, np.flatnonzero(borders) + 1)
    newest = np.append(starts[1:], buckets.shape[1]) - 1
    sums = np.add.reduceat(buckets[[COUNT, TOTAL]], starts, axis=1)
    lows = np.minimum.reduceat(buckets[[FIRST, LOW]], starts, axis=1)
    highs = np.maximum.reduceat(buckets[[LAST, HIGH]], starts, axis=1)
    steps, trajectories = buckets[[STEP, TRAJECTORIES]][:, newest]
    return np.stack([steps, lows[0], highs[0], trajectories, sums[0], sums[1], lows[1], highs[1]])
