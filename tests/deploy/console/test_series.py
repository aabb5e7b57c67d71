"""Series keep their extremes, and a repeated step counts once."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.deploy.console.downsampling import keep_extremes
from offbeat.deploy.console.series import SeriesIndex
from offbeat.services.telemetry import REWOUND_TO, MetricRecord, Partial
from offbeat.trainer.trackers.metrics_file import METRICS_FILE, MetricsFile


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=500), st.integers(4, 50))
def test_no_extreme_is_lost(values: list[float], count: int) -> None:
    column = np.array(values)
    kept = keep_extremes(column, count)
    assert len(kept) <= count
    assert (np.diff(kept) > 0).all()
    assert {0, len(values) - 1} <= set(kept.tolist())
    assert (column[kept].min(), column[kept].max()) == (column.min(), column.max())


def test_a_lone_peak_among_a_million_points_stays() -> None:
    values = np.zeros(1_000_000)
    values[654_321] = 1.0
    assert 654_321 in keep_extremes(values, 1000)


def record(step: int | None, value: float, source: str = "learner", **labels: str) -> MetricRecord:
    values = {"reward": Partial("last", value), "trajectories": Partial("sum", 8.0)}
    return MetricRecord(source, values, step, labels, time=100.0 + (value if math.isfinite(value) else 0.0))


def write(folder: Path, *records: MetricRecord, first: int = 1) -> None:
    file = MetricsFile(folder / METRICS_FILE)
    for i, each in enumerate(records):
        file.write(f"{first + i}-0", each)
    file.flush()
    file.close()


def view(index: SeriesIndex, name: str = "learner/reward", axis: str = "step") -> tuple[list[float], list[float]]:
    index.refresh()
    series = index.view([name], axis, None, 1000).series[name]  # pyright: ignore[reportArgumentType]
    return series.x, series.values


def test_a_step_that_a_later_learner_repeats_counts_once(tmp_path: Path) -> None:
    write(tmp_path, record(1, 1), record(2, 2), record(3, 3), record(2, 20), record(3, 30))
    index = SeriesIndex(tmp_path)
    assert view(index) == ([1, 2, 3], [1, 20, 30])
    assert view(index, axis="trajectories") == ([8, 16, 24], [1, 20, 30])
    assert view(index, axis="time") == ([101, 120, 130], [1, 20, 30])


def test_evaluations_and_services_are_placed_by_the_learners_steps(tmp_path: Path) -> None:
    evaluation = record(1, 0.5, "eval", sampling="greedy", when="during")
    write(tmp_path, record(None, 9, "rollout"), record(1, 1), evaluation, record(2, 2), record(None, 8, "rollout"))
    index = SeriesIndex(tmp_path)
    assert view(index, "eval-greedy/reward") == ([1], [0.5])
    assert view(index, "rollout/reward") == ([0, 2], [9, 8])
    assert view(index, "eval-greedy/reward", "trajectories") == ([8], [0.5])


def evaluation(step: int, value: float) -> MetricRecord:
    return record(step, value, "eval", sampling="sampled", when="during")


def test_an_evaluation_that_ends_after_a_later_one_takes_its_place_by_step(tmp_path: Path) -> None:
    write(tmp_path, record(1, 1), evaluation(0, 0.1), record(25, 2), evaluation(20, 0.8), evaluation(10, 0.5))
    index = SeriesIndex(tmp_path)
    assert view(index, "eval-sampled/reward") == ([0, 10, 20], [0.1, 0.5, 0.8])
    assert index.last["eval-sampled/reward"] == 0.8
    write(tmp_path, evaluation(20, 0.9), first=6)
    assert view(index, "eval-sampled/reward") == ([0, 10, 20], [0.1, 0.5, 0.9])


def test_evaluations_of_weights_that_are_given_up_are_not_shown(tmp_path: Path) -> None:
    rewound = MetricRecord("learner", {}, None, {REWOUND_TO: "10"}, time=1.0)
    write(tmp_path, record(20, 1), evaluation(10, 0.5), evaluation(20, 0.8), rewound)
    index = SeriesIndex(tmp_path)
    assert view(index, "eval-sampled/reward") == ([10], [0.5])
    assert index.last["eval-sampled/reward"] == 0.5
    write(tmp_path, record(11, 2), evaluation(20, 0.7), first=5)
    assert view(index, "eval-sampled/reward") == ([10, 20], [0.5, 0.7])


def test_records_of_services_at_a_step_are_one_point(tmp_path: Path) -> None:
    workers = [record(None, value, "rollout", worker=f"w{value}", kind="train") for value in (10, 20)]
    evaluation = record(None, 5, "rollout", worker="w1", kind="eval")
    write(tmp_path, record(1, 1), *workers, evaluation, record(2, 2), record(None, 40, "rollout", kind="train"))
    index = SeriesIndex(tmp_path)
    assert view(index, "rollout-train/reward") == ([1, 2], [15, 40])
    assert view(index, "rollout-train/reward", "trajectories") == ([8, 16], [15, 40])
    assert view(index, "rollout-train/reward", "time") == ([110, 120, 140], [10, 20, 40])
    assert view(index, "rollout-eval/reward") == ([1], [5])


def test_records_of_services_ascend_when_a_later_learner_repeats_steps(tmp_path: Path) -> None:
    def played(value: float) -> list[MetricRecord]:
        return [record(None, value, "rollout"), record(None, value + 2, "rollout")]

    steps = ((1, 1), (2, 2), (3, 3), (2, 20), (3, 30))
    write(tmp_path, *(each for step, value in steps for each in (record(step, value), *played(value))))
    index = SeriesIndex(tmp_path)
    for axis, x in (("step", [1, 2, 3]), ("trajectories", [8, 16, 24])):
        assert view(index, "rollout/reward", axis) == (x, [2, 21, 31])
    assert index.view(["rollout/reward"], "step", 2, 1000).series["rollout/reward"].x == [2, 3]


def test_lines_that_were_appended_again_count_once_and_new_ones_are_seen(tmp_path: Path) -> None:
    write(tmp_path, record(1, 1))
    index = SeriesIndex(tmp_path)
    assert view(index) == ([1], [1])
    text = (tmp_path / METRICS_FILE).read_text()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write(text + "no json\n" + json.dumps({"step": 1}) + "\n")
    write(tmp_path, record(2, math.nan), record(3, 3), first=2)
    assert view(index) == ([1, 3], [1, 3])
    assert index.last["learner/reward"] == 3


def test_only_points_from_since_on_are_sent(tmp_path: Path) -> None:
    write(tmp_path, *(record(step, step) for step in range(1, 11)))
    index = SeriesIndex(tmp_path)
    index.refresh()
    points = index.view(["learner/reward", "unknown"], "step", 8, 1000).series
    assert list(points) == ["learner/reward"]
    assert (points["learner/reward"].x, points["learner/reward"].total) == ([8, 9, 10], 3)


def test_a_run_without_metrics_has_none(tmp_path: Path) -> None:
    index = SeriesIndex(tmp_path)
    index.refresh()
    assert index.view(["learner/reward"], "step", None, 10).model_dump() == {
        "axis": "step",
        "series": {},
        "names": [],
        "last": {},
        "unread_bytes": 0,
    }


@pytest.mark.parametrize("count", [4, 5, 7])
def test_few_points_are_all_kept(count: int) -> None:
    assert keep_extremes(np.arange(4.0), count).tolist() == [0, 1, 2, 3]


def test_a_metric_is_one_series_whatever_stands_beside_it(tmp_path: Path) -> None:
    def row(step: int, **values: float) -> MetricRecord:
        return MetricRecord(
            "learner", {name: Partial("last", value) for name, value in values.items()}, step, time=100.0
        )

    write(tmp_path, row(1, a=1, b=2), row(2, a=3), row(3, b=4, a=5), row(2, b=6), row(4, a=math.nan, b=7))
    index = SeriesIndex(tmp_path)
    assert view(index, "learner/a") == ([1, 2, 3], [1, 3, 5])
    assert view(index, "learner/b") == ([1, 2, 4], [2, 6, 7])
    assert index.last == {"learner/a": 5, "learner/b": 7}
