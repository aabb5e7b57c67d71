"""What the control service tells of a run: the bodies of REST answers."""

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from services.buffer.client import Counters
from services.control.components import Health
from services.control.records import Restarts, RunRecord, RunState, Wanted
from services.telemetry import MetricRecord, Partial


class View(BaseModel):
    """Part of an answer."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class ComponentView(View):
    """One part of a run as the reconciler last saw it."""

    health: Health
    detail: str
    restarts: int
    """Times that it died and was started again."""


class CountersView(View):
    """The buffer's ledger: admitted = trained + dropped + failed + in flight."""

    admitted: int
    submitted: int
    trained: int
    dropped: dict[str, int]
    failed: dict[str, int]
    in_flight: int

    @classmethod
    def of(cls, counters: Counters) -> "CountersView":
        return cls(
            admitted=counters.admitted,
            submitted=counters.submitted,
            trained=counters.trained,
            dropped=counters.dropped,
            failed=counters.failed,
            in_flight=counters.in_flight,
        )


class PlacesView(View):
    """Where things lie on the host that runs it."""

    output_dir: str
    logs: str
    checkpoints: str
    tensorboard: str


class RunView(View):
    """One run."""

    id: str
    state: RunState
    wanted: Wanted
    phase: str
    """What the learner is at, in a word: `warm start`, `evaluating`, `training`."""
    error: str
    log: str
    """File in the run's folder that tells more about `error`."""
    step: int
    """Optimizer batches published; -1 before version 0."""
    version: int
    max_steps: int
    attempt: int
    created_at: float
    started_at: float
    running_at: float
    ended_at: float
    components: dict[str, ComponentView] = Field(default_factory=dict[str, ComponentView])
    counters: CountersView | None = None
    metrics: dict[str, float | None] = Field(default_factory=dict[str, float | None])
    """The learner's newest record."""
    places: PlacesView


class RunsView(View):
    """Several runs."""

    runs: list[RunView]


class PartialView(View):
    """One metric as one process saw it; merge parts of one kind, never their values."""

    kind: Literal["mean", "sum", "max", "min", "last"]
    total: float | None
    count: float
    value: float | None

    @classmethod
    def of(cls, partial: Partial) -> "PartialView":
        return cls(kind=partial.kind, total=finite(partial.total), count=partial.count, value=finite(partial.value))

    def partial(self) -> Partial:
        """The part that this shows."""
        return Partial(self.kind, math.nan if self.total is None else self.total, self.count)


class MetricView(View):
    """One metric record."""

    id: str
    source: str
    step: int | None
    labels: dict[str, str]
    time: float
    values: dict[str, PartialView]

    @classmethod
    def of(cls, entry_id: str, record: MetricRecord) -> "MetricView":
        values = {name: PartialView.of(partial) for name, partial in record.values.items()}
        return cls(
            id=entry_id, source=record.source, step=record.step, labels=record.labels, time=record.time, values=values
        )

    def record(self) -> MetricRecord:
        """The record that this shows; what JSON can't say (NaN) is NaN again."""
        values = {name: each.partial() for name, each in self.values.items()}
        return MetricRecord(self.source, values, self.step, self.labels, self.time)


class MetricsView(View):
    """Metric records in the order in which they came."""

    records: list[MetricView]
    next: str
    """Ask with `after` set to this for what comes next."""


class ProblemView(View):
    """One thing that is wrong with a configuration."""

    path: str
    message: str
    suggestion: str | None = None
    """The nearest valid key, where the key is unknown."""


class ErrorBody(View):
    """Why a call was refused."""

    code: str
    message: str
    problems: list[ProblemView] = Field(default_factory=list[ProblemView])


class ErrorView(View):
    """The body of every answer that is not a success."""

    error: ErrorBody


def finite(value: float) -> float | None:
    """JSON knows no NaN and no infinity."""
    return value if math.isfinite(value) else None


def places(record: RunRecord) -> PlacesView:
    """Where a run's things lie."""
    folder = record.output_dir
    return PlacesView(
        output_dir=folder,
        logs=f"{folder}/logs",
        checkpoints=f"{folder}/checkpoints",
        tensorboard=f"{folder}/tensorboard",
    )


def component_views(healths: dict[str, tuple[Health, str]], restarts: dict[str, Restarts]) -> dict[str, ComponentView]:
    """Components with how often they were restarted."""
    return {
        name: ComponentView(health=health, detail=detail, restarts=restarts.get(name, Restarts()).total)
        for name, (health, detail) in healths.items()
    }
