"""History of a run; a repeated step counts once, with its last values."""

from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from offbeat.services.diagnosis import WINDOW_STEPS
from offbeat.services.telemetry import REWOUND_TO, MetricRecord, Partial
from offbeat.services.text_samples import TextSample

RATE_S = 15.0
"""Window of rates; wider for rarer records."""
OF_EVERY_STEP = ("tokens_trained", "trajectories", "staleness_max", "success", "reward", "loss")
"""Kept for all steps."""
NOT_SEEN = float("nan")


def command_started(began: float) -> MetricRecord:
    """began: Unix time."""
    return MetricRecord("command", {"began": Partial("last", began)})


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    time: float
    """Unix time at its end, s."""
    values: dict[str, float]

    def value(self, name: str, default: float = NOT_SEEN) -> float:
        return self.values.get(name, default)


class Steps:
    """Unique steps in order, in compact columns."""

    def __init__(self) -> None:
        self.numbers = array("q")
        self.times = array("d")
        self._values = {name: array("d") for name in OF_EVERY_STEP}

    def columns(self) -> dict[str, "array[float]"]:
        """Return the values by name, missing ones as NaN."""
        return self._values

    def restore(self, numbers: "array[int]", times: "array[float]", columns: dict[str, "array[float]"]) -> None:
        self.numbers, self.times, self._values = numbers, times, columns

    def add(self, step: Step) -> None:
        """Add a step, dropping later ones."""
        while self.numbers and self.numbers[-1] >= step.number:
            for column in (self.numbers, self.times, *self._values.values()):
                column.pop()
        self.numbers.append(step.number)
        self.times.append(step.time)
        for name, column in self._values.items():
            column.append(step.value(name))

    def newest(self, count: int | None = None) -> list[Step]:
        first = 0 if count is None else max(len(self.numbers) - count, 0)
        return [self._step(row) for row in range(first, len(self.numbers))]

    def _step(self, row: int) -> Step:
        values = ((name, column[row]) for name, column in self._values.items())
        return Step(self.numbers[row], self.times[row], {name: value for name, value in values if value == value})


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Evaluation on held-out tasks."""

    kind: str
    """`before`, `during` or `after` training."""
    sampling: str
    """`sampled` (temperature 1), `greedy`, or `loss` of validation rows."""
    step: int
    time: float
    success: float
    """Mean over all episodes; without success: failure."""
    reward: float
    episodes: int
    success_missing: float = 0.0
    """Share of episodes without success."""
    loss: float = NOT_SEEN
    """Of validation rows."""
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    """All metrics."""


@dataclass
class RunHistory:
    position: str = "0"
    """Last record's id."""
    steps: Steps = field(default_factory=Steps)
    last_step: Step | None = None
    """Newest one, with all values."""
    samples: tuple[TextSample, ...] = ()
    """Of the newest logged step."""
    evaluations: dict[tuple[str, str, int], EvaluationResult] = field(
        default_factory=dict[tuple[str, str, int], EvaluationResult]
    )
    totals: dict[str, float] = field(default_factory=dict[str, float])
    """`source/metric` -> sum."""
    peaks: dict[str, float] = field(default_factory=dict[str, float])
    """`source/metric` -> maximum."""
    means: dict[str, Partial] = field(default_factory=dict[str, Partial])
    """`source/metric` -> mean."""
    attempts: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """(start, last sign of life), Unix times."""
    recent: dict[str, deque[tuple[float, float]]] = field(default_factory=dict[str, deque[tuple[float, float]]])
    """`source/metric` -> (time, amount) of sums in the window of rates."""
    now: float = 0.0
    """Newest record's time."""
    steps_of_window: list[Step] = field(default_factory=list[Step])
    """First step and the newest `WINDOW_STEPS`."""

    @property
    def window(self) -> list[Mapping[str, float]]:
        """Values of the first step and the newest `WINDOW_STEPS`."""
        return [step.values for step in self.steps_of_window]

    def add(self, records: Iterable[tuple[str, MetricRecord]]) -> None:
        for entry_id, record in records:
            self.position = entry_id
            self.now = max(self.now, record.time)
            self._count(record)
            if self.attempts and record.source != "command":
                self.attempts[-1] = (self.attempts[-1][0], max(record.time, self.attempts[-1][1]))
            match record.source:
                case "command":
                    began = record.values["began"].value
                    self.attempts.append((began, max(began, record.time)))
                case "learner":
                    self._add_learner(record)
                case "eval":
                    self._add_evaluation(record)
                case _:
                    continue

    def _count(self, record: MetricRecord) -> None:
        kind = record.labels.get("kind")
        source = f"{record.source}:{kind}" if kind else record.source
        for name, partial in record.values.items():
            key = f"{source}/{name}"
            match partial.kind:
                case "sum":
                    self.totals[key] = self.totals.get(key, 0.0) + partial.total
                    self._lately(key).append((record.time, partial.total))
                case "max":
                    self.peaks[key] = max(self.peaks.get(key, partial.total), partial.total)
                case "mean":
                    before = self.means.get(key)
                    self.means[key] = partial if before is None else before.merge(partial)
                case _:
                    continue

    def _lately(self, key: str) -> deque[tuple[float, float]]:
        recent = self.recent.setdefault(key, deque())
        while len(recent) > 2 and recent[0][0] < self.now - RATE_S:
            recent.popleft()
        return recent

    def _add_learner(self, record: MetricRecord) -> None:
        if (rewound_to := record.labels.get(REWOUND_TO)) is not None:
            self.evaluations = {k: each for k, each in self.evaluations.items() if each.step <= int(rewound_to)}
        if record.step is not None:
            values = {name: partial.value for name, partial in record.values.items()}
            self.samples = record.samples or self.samples
            self.last_step = Step(record.step, record.time, values)
            self.steps.add(self.last_step)
            self._add_to_window(self.last_step)

    def _add_to_window(self, step: Step) -> None:
        """Add a step after dropping later ones; the first one stays."""
        while self.steps_of_window and self.steps_of_window[-1].number >= step.number:
            del self.steps_of_window[-1]
        self.steps_of_window.append(step)
        if len(self.steps_of_window) > WINDOW_STEPS + 1:
            del self.steps_of_window[1]

    def _add_evaluation(self, record: MetricRecord) -> None:
        values = record.values
        result = EvaluationResult(
            kind=record.labels.get("when", "during"),
            sampling=record.labels.get("sampling", "sampled"),
            step=record.step or 0,
            time=record.time,
            success=values["success"].value if "success" in values else float("nan"),
            reward=values["reward"].value if "reward" in values else float("nan"),
            episodes=int(values["reward"].count) if "reward" in values else 0,
            success_missing=values["success_missing"].value if "success_missing" in values else 0.0,
            loss=values["loss"].value if "loss" in values else NOT_SEEN,
            values={name: partial.value for name, partial in values.items()},
        )
        self.evaluations[result.kind, result.sampling, result.step] = result

    def seconds(self, time: float) -> float:
        """Return running time until a Unix time."""
        return sum(min(max(time - began, 0.0), last - began) for began, last in self.attempts[:-1]) + sum(
            max(time - began, 0.0) for began, _ in self.attempts[-1:]
        )

    def evaluation(self, kind: str, sampling: str) -> EvaluationResult | None:
        results = [result for result in self.evaluations.values() if (result.kind, result.sampling) == (kind, sampling)]
        return max(results, key=lambda result: (result.step, result.time), default=None)

    def curve(self, sampling: str = "sampled") -> list[EvaluationResult]:
        """Return the evaluations of a kind by step."""
        results = [result for result in self.evaluations.values() if result.sampling == sampling]
        return sorted(results, key=lambda result: (result.step, result.time))

    def total(self, key: str) -> float:
        return self.totals.get(key, 0.0)

    def rate(self, key: str) -> float | None:
        """Return a rate per second over the newest records, falling when the next is overdue; None before two."""
        recent = self._lately(key)
        if len(recent) < 2 or recent[-1][0] <= recent[0][0]:
            return None
        # The first record's amount came before its time.
        amount, span_s = sum(amount for _, amount in recent) - recent[0][1], recent[-1][0] - recent[0][0]
        overdue_s = self.now - recent[-1][0] - max(span_s, RATE_S)
        return amount / (span_s + max(overdue_s, 0.0))

    def seconds_per_step(self, over: int = 20) -> float | None:
        steps = self.steps.newest(over + 1)
        if len(steps) < 2:
            return None
        first, last = steps[0], steps[-1]
        seconds = self.seconds(last.time) - self.seconds(first.time) if self.attempts else last.time - first.time
        return seconds / (last.number - first.number)
