"""Metrics of `metrics.jsonl` as columns: `source/name`, `source-<kind>/name`, evaluations as `eval-<sampling>/name`.

Invariants: a repeated step counts once, with its last values, also an evaluation that ends after a later one; of
evaluations at a step the last one counts; points ascend in x, as the means of other records at the same x, of which
`service_series` bounds the number.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.deploy.console.downsampling import keep_extremes
from offbeat.deploy.console.service_series import Floats, Places, Points, ServiceSeries, Tables
from offbeat.deploy.console.tail import JsonLinesTail
from offbeat.services.control.console.schemas import Axis, SeriesColumns, SeriesView
from offbeat.services.telemetry import REWOUND_TO
from offbeat.trainer.trackers.metrics_file import METRICS_FILE

LEARNER, EVALUATION, COMMAND = "learner", "eval", "command"
STEPPED = (LEARNER, EVALUATION)
"""Sources whose records have steps, which a later learner may repeat."""


class _Source:
    """Rows with steps of their own, which are all kept."""

    def __init__(self, source: str, places: Places) -> None:
        self.source = source
        self._places = places
        self._tables = Tables()
        self._rewinds: list[tuple[int, float]] = []
        """Row and step, after which earlier rows are of weights that are given up."""

    def add(self, row: int, metrics: Mapping[str, Any]) -> None:
        self._tables.add(row, metrics)

    def rewind(self, row: int, step: float) -> None:
        self._rewinds.append((row, step))

    @property
    def last(self) -> dict[str, float]:
        """Return the newest value of each metric, an evaluation's that of the newest step."""
        if self.source != EVALUATION:
            return self._tables.last
        values = {name: self._kept(name)[1] for name in self._tables.names()}
        return {name: float(each[-1]) for name, each in values.items() if len(each)}

    def points(self, name: str, axis: Axis) -> Points:
        rows, values = self._kept(name)
        return Points(np.frombuffer(self._places.axes[axis])[rows], values, np.ones(len(rows)))

    def _kept(self, name: str) -> tuple[NDArray[np.int64], Floats]:
        """Return rows and values of a metric, without those of steps that a later learner repeated."""
        rows, values = self._tables.rows(name)
        x = np.frombuffer(self._places.axes["step"])[rows]
        if self.source == EVALUATION:  # several are played at once, and may end in another order
            for row, step in self._rewinds:
                current = (rows > row) | (x <= step)
                rows, values, x = rows[current], values[current], x[current]
            _, newest = np.unique(x[::-1], return_index=True)
            return rows[len(x) - 1 - newest], values[len(x) - 1 - newest]
        kept = x < np.append(np.minimum.accumulate(x[1:][::-1])[::-1], np.inf)
        return rows[kept], values[kept]


class SeriesIndex:
    def __init__(self, folder: Path) -> None:
        self._tail = JsonLinesTail(folder / METRICS_FILE)
        self._clear()

    def _clear(self) -> None:
        self._places = Places()
        """Of the learner's and evaluations' rows."""
        self._sources: dict[str, _Source] = {}
        self._services: dict[str, ServiceSeries] = {}
        self._newest_id = (0, 0)
        self._step = 0.0
        self._trajectories: list[tuple[float, float]] = [(0.0, 0.0)]
        """Step and trajectories trained up to it, ascending."""

    def refresh(self, for_s: float = math.inf) -> None:
        """Read new records, for about `for_s`; the next call continues."""
        if self._tail.restarted():
            self._clear()
        for row in self._tail.read(for_s):
            self._add(row)

    @property
    def last(self) -> dict[str, float | None]:
        """Return the newest value of each metric, by name."""
        sources = {**self._sources, **self._services}
        values = {f"{prefix}/{name}": value for prefix, each in sources.items() for name, value in each.last.items()}
        return dict(sorted(values.items()))

    def view(self, names: Sequence[str], axis: Axis, since: float | None, points: int) -> SeriesView:
        last = self.last
        series = {name: self._points(name, axis, since, points) for name in dict.fromkeys(names) if name in last}
        return SeriesView(
            axis=axis, series=series, names=list(last), last=last, unread_bytes=self._tail.num_unread_bytes
        )

    def _points(self, name: str, axis: Axis, since: float | None, count: int) -> SeriesColumns:
        prefix, _, metric = name.partition("/")
        source = self._sources[prefix] if prefix in self._sources else self._services[prefix]
        places, totals, counts = source.points(metric, axis)
        x, points = np.unique(places, return_inverse=True)
        values = np.bincount(points, weights=totals) / np.bincount(points, weights=counts)
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
                each.rewind(len(self._places) - 1, float(labels[REWOUND_TO]))
        is_stepped = step is not None and source in STEPPED
        place = float(step) if step is not None and is_stepped else self._step
        if source == LEARNER and is_stepped:
            self._count_trajectories(place, float(values.get("trajectories") or 0.0))
        prefix = _prefix(source, labels)
        trajectories = self._trained_by(place)
        if source in STEPPED:
            if prefix not in self._sources:
                self._sources[prefix] = _Source(source, self._places)
            self._sources[prefix].add(self._places.add(place, time, trajectories), values)
        else:
            if prefix not in self._services:
                self._services[prefix] = ServiceSeries()
            self._services[prefix].add(place, time, trajectories, values)

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
