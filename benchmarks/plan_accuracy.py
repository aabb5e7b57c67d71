"""`offbeat bench plan`: rows of `bench async` and `bench redundancy`, predicted from one other row and then measured.

Invariant: a row is never predicted from its own measurements; policy and training are emulated.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.status import Status

from offbeat.benchmarks import redundancy
from offbeat.benchmarks.async_training import AsyncOptions, PlayedSetting, open_bench
from offbeat.benchmarks.harness.environment import BenchEnvironment, bench_environment
from offbeat.benchmarks.harness.result import console, show
from offbeat.benchmarks.redundancy import RedundancyOptions
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.plan.estimate import Effort, estimate
from offbeat.deploy.plan.measurements import Measured, measure, read_batches
from offbeat.deploy.plan.metric_rows import MetricRow
from offbeat.deploy.plan.outcome import Setup
from offbeat.deploy.plan.plan import setup_of
from offbeat.deploy.plan.simulation import Simulation
from offbeat.deploy.plan.workload import MeasuredWorkload
from offbeat.services.telemetry import MetricRecord, RedisMetrics

SEEDS = 24


@dataclass(frozen=True, slots=True)
class PlanOptions:
    training: AsyncOptions = field(default_factory=lambda: AsyncOptions(work="emulated", steps=24))
    redundancy: RedundancyOptions = field(
        default_factory=lambda: RedundancyOptions(mean_s=0.15, normal_std_s=0.075, lognormal_std_s=0.75, rounds=12)
    )
    distributions: tuple[str, ...] = ("normal", "lognormal")
    parts: tuple[str, ...] = ("async", "redundancy")

    @classmethod
    def of(cls, steps: int, rounds: int) -> "PlanOptions":
        """Return options with so many batches of async, and of redundancy."""
        base = cls()
        return replace(
            base, training=replace(base.training, steps=steps), redundancy=replace(base.redundancy, rounds=rounds)
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """Value of a row."""

    row: str
    quantity: str
    predicted: float
    spread: float
    """Of the prediction over simulated runs."""
    measured: float
    from_row: str
    lags: tuple[float, ...] = ()
    """Predicted share of trained groups."""
    measured_lags: tuple[float, ...] = ()
    measures: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of the other row."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def run(options: PlanOptions) -> dict[str, Any]:
    predictions: dict[str, list[Prediction]] = {}
    with console().status("starting") as status:
        for distribution in options.distributions:
            if "async" in options.parts:
                predictions[f"async, {distribution}"] = _async(options.training, distribution, status)
            if "redundancy" in options.parts:
                predictions[f"redundancy, {distribution}"] = _redundancy(options.redundancy, distribution, status)
    for title, rows in predictions.items():
        _show(title, rows)
    return {
        "predictions": {
            title: [{**asdict(row), "error": row.error} for row in rows] for title, rows in predictions.items()
        }
    }


def _async(options: AsyncOptions, distribution: str, status: Status) -> list[Prediction]:
    """Predict each bound from the synchronous row, and that from the greatest bound's."""
    changes = {"zero_variance": "train", "record_batches": options.steps}
    with open_bench(options, status, changes) as bench:
        bounds = (0.0, *options.staleness)
        played = {bound: bench.play(distribution, bound, status.update) for bound in bounds}
        measured = {
            bound: _measure(bench.environment, played[bound].config, played[bound].records)
            for bound in (bounds[0], bounds[-1])
        }
        return [_predict_async(played[bound], measured, bounds[0] if bound else bounds[-1]) for bound in bounds]


def _measure(base: BenchEnvironment, config: RunConfig, records: Sequence[MetricRecord]) -> Measured:
    batches, _ = read_batches(config.output_dir, config)
    rollout = (record for _, record in RedisMetrics(base.redis, config.exp_name).read(count=100_000))
    groups = [group.trajectories for batch in batches for group in batch.groups]
    return measure([*_rows(records), *_rows(rollout)], groups, where=config.exp_name)


def _rows(records: Iterable[MetricRecord]) -> list[MetricRow]:
    return [
        MetricRow(r.time, r.source, {name: part.value for name, part in r.values.items()}, r.step, r.labels)
        for r in records
    ]


def _predict_async(played: PlayedSetting, measured: dict[float, Measured], origin: float) -> Prediction:
    config, result = played.config, played.result
    expected = estimate(_setup(config), measured[origin].measures, Effort(config.max_steps - 1, 1, SEEDS))
    batches, _ = read_batches(config.output_dir, config)
    lags = Counter(batch.step - group.oldest_version for batch in batches[1:] for group in batch.groups)
    most = max([*lags, *expected.lags], default=0)
    name, source = f"max_staleness {result.max_staleness:g}", f"max_staleness {origin:g}"
    predicted_lags = tuple(expected.lags.get(lag, 0.0) for lag in range(most + 1))
    measured_lags = tuple(lags[lag] / max(lags.total(), 1) for lag in range(most + 1))
    return Prediction(
        name,
        "trajectories/s",
        expected.trajectories_per_s,
        expected.spread,
        result.trajectories_per_s,
        source,
        predicted_lags,
        measured_lags,
        _describe(measured[origin]),
    )


def _setup(config: RunConfig) -> Setup:
    """Return a run's setting; the benchmarks' learner takes groups as they complete."""
    return replace(setup_of(config), order="completion")


def _describe(measured: Measured) -> dict[str, Any]:
    """Return a prediction's input, without single episodes."""
    measures = measured.measures
    groups = measures.workload.groups if isinstance(measures.workload, MeasuredWorkload) else ()
    weights = measures.workload.weights if isinstance(measures.workload, MeasuredWorkload) else ()
    return {
        "groups": len(groups),
        "effective_groups": sum(weights) ** 2 / sum(weight**2 for weight in weights) if weights else len(groups),
        "turn_s": measures.turn_s.points,
        "worker_s": measures.worker_s,
        "train_s": measures.train_fixed_s,
        "publish_s": measures.publish_s,
        "other_s": measures.other_s,
        "serve_s": measures.serve_s,
        "slowest_env_s": [max(episode.env_s for episode in group) for group in groups],
    }


def _redundancy(options: RedundancyOptions, distribution: str, status: Status) -> list[Prediction]:
    """Predict each setting from the one without redundancy."""
    cells = ((options.num_groups, options.group_size), *options.over)
    changes = {"zero_variance": "train", "record_batches": options.rounds + 1}
    with bench_environment() as base:
        with redundancy.start_rollouts(base, options) as rollouts:
            played = [
                redundancy.play(options, base, rollouts, distribution, *cell, status, **changes) for cell in cells
            ]
        source = _measure(base, played[0].config, played[0].records)
        return [
            _predict_batch(cell, each.config, source, statistics.fmean(redundancy.batch_times(each.records)), cells[0])
            for cell, each in zip(cells[1:], played[1:], strict=True)
        ]


def _predict_batch(
    cell: tuple[int, int], config: RunConfig, source: Measured, measured_s: float, origin: tuple[int, int]
) -> Prediction:
    setup = _setup(config)
    steps = config.max_steps - 1
    outcomes = [Simulation(setup, source.measures, seed).run(steps + 1, 1) for seed in range(SEEDS)]
    means = [statistics.fmean(outcome.waits_s) for outcome in outcomes]
    spread = statistics.stdev(means)
    return Prediction(
        _name(cell), "s a batch", statistics.fmean(means), spread, measured_s, _name(origin), measures=_describe(source)
    )


def _name(cell: tuple[int, int]) -> str:
    return f"{cell[0]} x {cell[1]}"


def _show(title: str, rows: Sequence[Prediction]) -> None:
    def shares(values: tuple[float, ...]) -> str:
        return " ".join(f"{value:.2f}" for value in values)

    columns = (
        "row",
        "predicted from",
        "quantity",
        "predicted",
        "+-",
        "measured",
        "error",
        "lags 0, 1, ...",
        "measured lags",
    )
    cells = [
        (
            r.row,
            r.from_row,
            r.quantity,
            r.predicted,
            r.spread,
            r.measured,
            f"{r.error:+.1%}",
            shares(r.lags),
            shares(r.measured_lags),
        )
        for r in rows
    ]
    show(title, columns, cells)


def quick() -> PlanOptions:
    training = AsyncOptions(
        work="emulated", distributions=("lognormal",), mean_s=0.01, std_s=0.02, staleness=(1.0,),
        steps=4, batch=16, env_groups=4, train_s=0.05, answer_s=0.002,
    )  # fmt: skip
    collecting = RedundancyOptions(
        mean_s=0.01, lognormal_std_s=0.05, num_groups=4, group_size=2, over=((5, 3),), rounds=2
    )
    return replace(PlanOptions(), training=training, redundancy=collecting, distributions=("lognormal",))
