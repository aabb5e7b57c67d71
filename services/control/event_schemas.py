"""REST schemas of metrics, group events and run history."""

import math
from typing import Any, Literal

from offbeat.services.control.schemas import View, finite
from offbeat.services.telemetry import MetricRecord, Partial
from offbeat.services.text_samples import TextSample


class PartialView(View):
    """Mergeable part of a metric from one process."""

    kind: Literal["mean", "sum", "max", "min", "last"]
    total: float | None
    count: float
    value: float | None

    @classmethod
    def of(cls, partial: Partial) -> "PartialView":
        return cls(kind=partial.kind, total=finite(partial.total), count=partial.count, value=finite(partial.value))

    def partial(self) -> Partial:
        return Partial(self.kind, math.nan if self.total is None else self.total, self.count)


class MetricView(View):
    """Metric record."""

    id: str
    source: str
    step: int | None
    labels: dict[str, str]
    time: float
    values: dict[str, PartialView]
    samples: tuple[TextSample, ...] = ()
    """Excerpts of trajectories, at logged steps."""

    @classmethod
    def of(cls, entry_id: str, record: MetricRecord) -> "MetricView":
        values = {name: PartialView.of(partial) for name, partial in record.values.items()}
        return cls(
            id=entry_id,
            source=record.source,
            step=record.step,
            labels=record.labels,
            time=record.time,
            values=values,
            samples=record.samples,
        )

    def record(self) -> MetricRecord:
        """Convert; null becomes NaN."""
        values = {name: each.partial() for name, each in self.values.items()}
        return MetricRecord(self.source, values, self.step, self.labels, self.time, self.samples)


class MetricsView(View):
    """Metric records in order."""

    records: list[MetricView]
    next: str
    """`after` of the next page."""


class LifeView(View):
    """Group event."""

    group: int
    """0 of `reconciled`."""
    event: Literal["admitted", "submitted", "trained", "dropped", "failed", "restored", "reconciled"]
    """After a loss in Redis `restored`, `reconciled`."""
    detail: str
    """admitted, submitted: version at admission; trained: step of the checkpoint; restored: step, colon, its trained
    groups; reconciled: incarnation or `clock`; else the reason.
    """


class HistoryView(View):
    """Event in the run's history."""

    event: Literal["created", "wanted", "state", "died", "recovered", "asked", "adopted"]
    at: float
    detail: dict[str, Any]
