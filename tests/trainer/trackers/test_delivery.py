"""A tracker receives each step and evaluation once, across restarts of the learner and of the tracker."""

from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.services.telemetry import REWOUND_TO, MetricRecord, mean
from offbeat.services.text_samples import TextSample
from offbeat.trainer.trackers.base import LoggedSteps, Row, TrackedRun, Tracker
from offbeat.trainer.trackers.cursor import DeliveryCursor, read_progress
from offbeat.trainer.trackers.delivery import Delivery, TrackerDownError
from offbeat.trainer.trackers.metrics_file import MetricsFile


class RecordingTracker(Tracker):
    """Keeps every row that it does not refuse."""

    def __init__(self, refuses: set[int] | None = None, *, flushes: bool = True) -> None:
        super().__init__(TrackedRun("run", "key", False, 0, Path(), {}))
        self.rows: list[Row] = []
        self.refuses = refuses or set()
        self.flushes = flushes

    def write(self, row: Row) -> None:
        if row.number in self.refuses:
            raise ValueError(f"no {row.number}")
        self.rows.append(row)

    def flush(self) -> None:
        if not self.flushes:
            raise OSError("full")

    @property
    def numbers(self) -> list[int]:
        return [row.number for row in self.rows]


def step(number: int, value: float = 0.5) -> MetricRecord:
    return MetricRecord("learner", {"reward": mean([value])}, step=number)


def evaluation(at: int, sampling: str = "sampled", when: str = "during") -> MetricRecord:
    return MetricRecord("eval", {"success": mean([0.5])}, step=at, labels={"sampling": sampling, "when": when})


GAUGE = MetricRecord("generation", {"running": mean([3.0])}, labels={"replica": "0"})
PHASE = MetricRecord("learner", {}, labels={"phase": "training"})


def append(folder: Path, *records: MetricRecord) -> None:
    file = MetricsFile(folder / "metrics.jsonl")
    for record in records:
        file.write("1-0", record)
    file.close()


def delivery(folder: Path, tracker: Tracker) -> Delivery:
    path = folder / "progress.json"
    return Delivery(folder / "metrics.jsonl", path, read_progress(path), tracker)


def deliver(folder: Path, tracker: Tracker) -> DeliveryCursor:
    """Deliver everything as one tracker process would."""
    process = delivery(folder, tracker)
    while process.round():
        pass
    return process.progress


def test_steps_of_weights_that_were_given_up_are_not_sent(tmp_path: Path):
    rewound = MetricRecord("learner", {}, labels={REWOUND_TO: "1"})
    append(tmp_path, step(1), evaluation(1), step(2), step(3), GAUGE, evaluation(3), rewound)
    append(tmp_path, step(2), evaluation(2), step(3))
    tracker = RecordingTracker()
    progress = deliver(tmp_path, tracker)
    assert [(row.number, row.step) for row in tracker.rows] == [(1, 1), (2, 1), (5, 1), (8, 2), (9, 2), (10, 3)]
    assert (progress.number, progress.step, progress.repeated) == (10, 3, 0)


def test_rows_are_named_by_source_and_gauges_get_the_newest_step(tmp_path: Path):
    append(tmp_path, step(1, 0.25), PHASE, GAUGE, evaluation(0, "greedy"), step(2))
    tracker = RecordingTracker()
    deliver(tmp_path, tracker)
    assert [(row.number, row.step, dict(row.values)) for row in tracker.rows] == [
        (1, 1, {"learner/reward": 0.25}),
        (3, 1, {"generation/running": 3.0}),
        (4, 0, {"eval/greedy/success": 0.5}),
        (5, 2, {"learner/reward": 0.5}),
    ]


def test_steps_repeated_after_a_resume_are_not_sent_again(tmp_path: Path):
    append(tmp_path, step(1), step(2), evaluation(2), step(3))
    tracker = RecordingTracker()
    deliver(tmp_path, tracker)
    append(tmp_path, step(2, 9.0), evaluation(2), evaluation(2, "greedy"), step(3, 9.0), step(4))
    progress = deliver(tmp_path, tracker)
    assert [(row.step, *row.values) for row in tracker.rows] == [
        (1, "learner/reward"),
        (2, "learner/reward"),
        (2, "eval/sampled/success"),
        (3, "learner/reward"),
        (2, "eval/greedy/success"),
        (4, "learner/reward"),
    ]
    assert (progress.repeated, progress.number, progress.step) == (3, 9, 4)


def test_the_final_evaluation_at_a_step_that_was_evaluated_before_is_sent(tmp_path: Path):
    """A run is resumed with fewer steps."""
    append(tmp_path, step(20), evaluation(20))
    tracker = RecordingTracker()
    deliver(tmp_path, tracker)
    append(tmp_path, evaluation(20, when="after"), evaluation(20, when="after"))
    assert deliver(tmp_path, tracker).repeated == 1
    assert tracker.numbers == [1, 2, 3]


def test_an_evaluation_that_an_earlier_build_sent_is_not_sent_again(tmp_path: Path):
    append(tmp_path, evaluation(20), evaluation(40))
    (tmp_path / "progress.json").write_text('{"key": "k", "evaluations": ["sampled-20"]}')
    tracker = RecordingTracker()
    assert deliver(tmp_path, tracker).repeated == 1
    assert tracker.numbers == [2]


def test_evaluation_that_ends_after_a_later_one_is_sent(tmp_path: Path):
    append(tmp_path, step(20), evaluation(20), evaluation(10))
    tracker = RecordingTracker()
    deliver(tmp_path, tracker)
    assert [row.step for row in tracker.rows] == [20, 20, 10]


def test_incomplete_line_is_sent_once_complete(tmp_path: Path):
    append(tmp_path, step(1), step(2))
    path = tmp_path / "metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    tracker = RecordingTracker()
    process = delivery(tmp_path, tracker)
    process.round()
    assert tracker.numbers == [1]
    path.write_bytes(content)
    process.round()
    assert tracker.numbers == [1, 2]


def test_row_refused_while_others_are_accepted_is_skipped_and_counted(tmp_path: Path):
    append(tmp_path, *map(step, range(1, 7)))
    tracker = RecordingTracker({2, 3, 5})
    progress = deliver(tmp_path, tracker)
    assert (tracker.numbers, progress.refused, progress.number) == ([1, 4, 6], 3, 6)


@pytest.mark.parametrize("first_refused", [2, 4, 5, 6])
def test_down_tracker_loses_no_rows(tmp_path: Path, first_refused: int):
    append(tmp_path, *map(step, range(1, 7)))
    down = RecordingTracker(set(range(first_refused, 100)))
    with pytest.raises(
        TrackerDownError, match=f"ValueError: no {first_refused if first_refused > 4 else first_refused + 2}|no 6"
    ):
        delivery(tmp_path, down).round()
    again = RecordingTracker()
    progress = deliver(tmp_path, again)
    assert down.numbers + again.numbers == [1, 2, 3, 4, 5, 6]
    assert progress.refused == 0


def test_unflushed_rows_are_sent_again(tmp_path: Path):
    append(tmp_path, step(1), step(2))
    with pytest.raises(TrackerDownError, match="full"):
        delivery(tmp_path, RecordingTracker(flushes=False)).round()
    again = RecordingTracker()
    deliver(tmp_path, again)
    assert again.numbers == [1, 2]


def test_key_is_kept_unless_the_lineage_changes():
    progress = DeliveryCursor()
    assert not progress.open("monday", keep_key=False)
    key = progress.key
    progress.advance(1, 10, {"source": "learner", "step": 7, "labels": {}})
    assert progress.open("monday", keep_key=False)
    assert progress.open("tuesday", keep_key=True)  # resume_from_checkpoint=true
    assert progress.key == key
    assert not progress.open("tuesday/2", keep_key=False)  # from a checkpoint by name
    assert progress.key != key
    assert (progress.step, progress.number) == (0, 1)


SAMPLES = (TextSample(2, 1, "Lake", 1.0, "prompt \U0001f600 \ud83d", ("a",), ("a",)),)


def test_a_tracker_gets_every_nth_step_and_the_last_and_all_else(tmp_path: Path):
    append(tmp_path, *(step(number) for number in range(1, 6)), GAUGE, evaluation(3), step(6), step(7))
    tracker = RecordingTracker()
    path = tmp_path / "progress.json"
    process = Delivery(tmp_path / "metrics.jsonl", path, read_progress(path), tracker, LoggedSteps(3, 7))
    assert process.round() == 9
    assert [(row.step, next(iter(row.values)).split("/")[0]) for row in tracker.rows] == [
        (3, "learner"), (5, "generation"), (3, "eval"), (6, "learner"), (7, "learner")
    ]  # fmt: skip


def test_samples_reach_a_tracker_with_their_step_once(tmp_path: Path):
    with_samples = replace(step(2), samples=SAMPLES)
    append(tmp_path, step(1), with_samples, with_samples)
    tracker = RecordingTracker()
    deliver(tmp_path, tracker)
    assert [(row.step, row.samples) for row in tracker.rows] == [(1, ()), (2, SAMPLES)]


def test_a_line_longer_than_the_tail_does_not_hide_the_newest_record(tmp_path: Path):
    """The stream's records after it would otherwise be written from the start again."""
    long = replace(step(2), samples=(replace(SAMPLES[0], prompt="\u65e5" * 50_000),))
    append(tmp_path, step(1), long)
    assert MetricsFile(tmp_path / "metrics.jsonl").position == "1-0"
