"""Series of services stay small, and lose neither a step's mean nor an extreme."""

from pathlib import Path

import numpy as np
import pytest

from offbeat.deploy.console.archive import FolderArchive
from offbeat.deploy.console.series import SeriesIndex
from offbeat.deploy.console.service_series import MAX_BUCKETS, MAX_ROWS, ServiceSeries
from offbeat.services.telemetry import MetricRecord, Partial
from offbeat.trainer.trackers.metrics_file import METRICS_FILE, MetricsFile
from tests.memory import measure_memory

RECORDS = 100_000
PER_STEP = 300


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    return np.random.default_rng(0).normal(size=RECORDS)


def make(values: np.ndarray, per_step: int = PER_STEP) -> ServiceSeries:
    series = ServiceSeries()
    for i, value in enumerate(values):
        step = i // per_step
        series.add(step, i / 100, 8 * step, {"playing": float(value), f"odd-{i % 2}": 1.0})
    return series


def test_memory_does_not_grow_with_the_records_of_a_step() -> None:
    def make_series(num_records: int) -> ServiceSeries:
        series = ServiceSeries()
        for i in range(num_records):
            series.add(1, float(i), 8, {"a": float(i), "b": 2.0, "c": 3.0})
        return series

    shorter, longer = (measure_memory(lambda n=n: make_series(n * MAX_ROWS))[0] for n in (8, 12))
    assert longer < 1.1 * shorter
    series = make_series(12 * MAX_ROWS)
    assert len(series.points("a", "step").x) <= MAX_BUCKETS + MAX_ROWS


def test_a_steps_mean_is_exact_however_many_records_it_has(values: np.ndarray) -> None:
    series = make(values)
    for axis, factor in (("step", 1), ("trajectories", 8)):
        x, totals, counts = series.points("playing", axis)  # pyright: ignore[reportArgumentType]
        assert len(x) <= MAX_BUCKETS + MAX_ROWS < RECORDS
        steps, place = np.unique(x, return_inverse=True)
        means = np.bincount(place, weights=totals) / np.bincount(place, weights=counts)
        numbers = np.arange(RECORDS) // PER_STEP
        assert steps.tolist() == (factor * np.unique(numbers)).tolist()
        assert means == pytest.approx(np.bincount(numbers, weights=values) / np.bincount(numbers))
        assert counts.sum() == RECORDS


def test_a_lone_peak_of_an_hour_ago_stays_on_the_time_axis(values: np.ndarray) -> None:
    peaked = values.copy()
    peaked[4321], peaked[54321] = 1e6, -1e6
    x, totals, counts = make(peaked).points("playing", "time")
    assert (totals.max(), totals.min()) == (1e6, -1e6)
    assert (counts == 1).all()
    assert x[totals.argmax()] == pytest.approx(43.21, abs=1)
    assert (x.min(), x.max()) == (0, (RECORDS - 1) / 100)


def test_more_steps_than_buckets_share_them(values: np.ndarray) -> None:
    series = make(values, per_step=1)
    x, totals, counts = series.points("playing", "step")
    assert len(x) <= MAX_BUCKETS + MAX_ROWS < RECORDS
    assert (np.diff(x) > 0).all()
    assert totals.sum() == pytest.approx(values.sum())
    assert (x[-1], counts.sum()) == (RECORDS - 1, RECORDS)


def test_steps_that_a_later_learner_repeats_are_left_out_of_buckets(values: np.ndarray) -> None:
    series = make(values)
    series.add(100, 1e6, 800, {"playing": 7.0})
    x, totals, _ = series.points("playing", "step")
    assert (x[-1], totals[-1], x.max()) == (100, 7.0, 100)
    assert len(np.unique(x)) == 101
    assert series.last == {"playing": 7.0, "odd-0": 1.0, "odd-1": 1.0}


def test_few_records_are_points_as_they_are() -> None:
    values = np.arange(MAX_ROWS + 10.0)
    x, totals, counts = make(values).points("playing", "time")
    assert totals.tolist() == values.tolist()
    assert x.tolist() == (np.arange(len(values)) / 100).tolist()
    assert (counts == 1).all()


def test_a_call_that_can_not_read_all_says_what_is_left(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / METRICS_FILE)
    for i in range(2000):
        file.write(f"{i + 1}-0", MetricRecord("rollout", {"playing": Partial("last", i)}, time=float(i)))
    file.flush()
    file.close()
    index, left = SeriesIndex(tmp_path), list[int]()
    while not left or left[-1]:
        index.refresh(0)
        left.append(index.view([], "step", None, 4).unread_bytes)
    assert left[0] > 0
    assert left == sorted(left, reverse=True)
    assert index.last == {"rollout/playing": 1999}
    assert FolderArchive(tmp_path).latest() == {"rollout/playing": 1999}
