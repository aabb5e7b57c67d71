"""Evaluations: what is recorded, and what is written down."""

import json
from pathlib import Path

from offbeat.services.messages.codec import decode_trajectories
from offbeat.trainer.learner.evaluations import MAX_SAVED_EPISODES, Evaluation, Evaluations
from tests.fakes import (
    DictLog,
    FakeLearnerBuffer,
    ListSink,
    make_trajectory,
)


def evaluate(
    folder: Path, evaluation: Evaluation, num_done: int, version: int = 3
) -> tuple[ListSink, FakeLearnerBuffer]:
    buffer, sink = FakeLearnerBuffer(), ListSink()
    evaluations = Evaluations(buffer, sink, DictLog(), folder)
    evaluations.start(evaluation)
    evaluations.collect()
    assert not sink.records
    buffer.evaluations[evaluation.eval_id] = [
        make_trajectory(i, reward=float(i % 4 == 0), version=version, text=("sys", "obs", "Down"))
        for i in range(num_done)
    ]
    evaluations.collect()
    return sink, buffer


def test_the_record_tells_success_and_which_weights_played(tmp_path: Path) -> None:
    sink, buffer = evaluate(tmp_path, Evaluation("during", "sampled", 3, 8), num_done=8)
    (record,) = sink.records
    assert (record.source, record.step) == ("eval", 3)
    assert record.labels == {"when": "during", "sampling": "sampled"}
    assert record.values["success"].value == 0.25
    assert record.values["reward"].count == 8.0
    assert (record.values["version_min"].value, record.values["version_max"].value) == (3.0, 3.0)
    assert buffer.started == [("during-sampled-3", 8, "sampled", 3)]
    assert not buffer.evaluations


def test_episodes_that_failed_are_counted_not_averaged(tmp_path: Path) -> None:
    sink, _ = evaluate(tmp_path, Evaluation("after", "greedy", 3, 8), num_done=4)
    values = sink.records[0].values
    assert (values["episodes"].total, values["episodes_failed"].total) == (4.0, 4.0)
    assert values["success"].value == 0.25


def test_an_evaluation_of_which_nothing_came_back_still_ends(tmp_path: Path) -> None:
    sink, _ = evaluate(tmp_path, Evaluation("after", "greedy", 3, 8), num_done=0)
    assert list(sink.records[0].values) == ["episodes_failed"]


def test_the_first_episodes_are_written_down_with_their_text(tmp_path: Path) -> None:
    evaluate(tmp_path, Evaluation("after", "sampled", 3, 50), num_done=50)
    rows = [json.loads(line) for line in (tmp_path / "after-sampled-3.jsonl").read_text().splitlines()]
    assert len(rows) == MAX_SAVED_EPISODES
    assert rows[4]["seed"] == 4
    assert rows[4]["text"] == ["sys", "obs", "Down"]
    assert rows[4]["metrics"] == {"success": 1.0}
    kept = decode_trajectories((tmp_path / "after-sampled-3.trajectories").read_bytes())
    assert [trajectory.seed for trajectory in kept] == [row["seed"] for row in rows]
    assert kept[4].text == ("sys", "obs", "Down")


def test_an_evaluation_that_was_recorded_is_not_played_again(tmp_path: Path) -> None:
    buffer = FakeLearnerBuffer()
    log = DictLog({"before-sampled-0": "recorded", "during-greedy-7": "16"})
    evaluations = Evaluations(buffer, ListSink(), log, tmp_path)
    evaluations.start(Evaluation("before", "sampled", 0, 8))
    assert buffer.started == [("during-greedy-7", 16, "greedy", 7)]
