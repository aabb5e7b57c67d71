"""A disk without room for a checkpoint: training continues, nothing is lost, nothing is acknowledged too early."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from offbeat.services.jsonl import LinesFile
from offbeat.services.telemetry import Partial
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.learner.loop import Learner
from offbeat.trainer.learner.reporter import LearnerReporter
from offbeat.trainer.learner.step_ledger import StepLedger, newest_epoch, note_lease, read_step_ledger
from offbeat.trainer.process.run_checkpoints import StoppedError, wait_for_room
from tests.fakes import CrashError, DictBoard, FakeTrainer, ListSink, Moments
from tests.trainer.learner.harness import LearnerHarness, learner_config


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.trainer.learner.checkpointing.RETRY_INTERVAL_S", 0.0)


def full_disk(harness: LearnerHarness, full: Callable[[], bool]) -> tuple[Learner, FakeTrainer]:
    learner, trainer = harness.learner(should_stop=lambda: False)
    write = trainer.save

    def save(folder: Path) -> None:
        (folder / "half.bin").write_text("half of the weights")
        if full():
            raise OSError(28, "No space left on device")
        (folder / "half.bin").unlink()
        write(folder)

    trainer.save = save
    return learner, trainer


@pytest.mark.usefixtures("no_waiting")
def test_training_continues_on_a_full_disk_and_the_next_checkpoint_has_all(
    harness: LearnerHarness,
) -> None:
    seen: list[tuple[int, list[int], list[str]]] = []

    def full() -> bool:
        steps = [path.name for path in (harness.folder / "checkpoints").glob("step-*")]
        seen.append((len(trainer.history), list(harness.buffer.trained), steps))
        return len(trainer.history) in (3, 4)

    learner, trainer = full_disk(harness, full)
    assert learner.run()
    assert trainer.history == [(step, (2 * step, 2 * step + 1)) for step in range(6)]
    # Step 3's and its retry at step 4 fail: nothing is acknowledged, nothing half-written gets a name
    assert seen[:3] == [(3, [], []), (4, [], []), (5, [], [])]
    assert harness.buffer.trained == list(range(12))
    assert sorted(path.name for path in (harness.folder / "checkpoints").glob("[!.]*-*")) == [
        "step-000005",
        "step-000006",
    ]
    assert harness.board.fields["learner_trouble"] == ""
    assert (
        sum(r.values["checkpoints_failed"].total for r in harness.sink.records if "checkpoints_failed" in r.values) == 2
    )


@pytest.mark.usefixtures("no_waiting")
def test_a_failed_checkpoint_leaves_the_last_one_to_resume_from(
    tmp_path: Path,
) -> None:
    harness = LearnerHarness(tmp_path, learner_config(save_steps=2))
    learner, trainer = full_disk(harness, lambda: len(trainer.history) > 3)
    harness.publisher.moments = Moments(crash_at=6)
    with pytest.raises(CrashError):
        learner.run()
    assert harness.buffer.trained == list(range(4))
    assert "step 4 could not be written ([Errno 28]" in harness.board.fields["learner_trouble"]
    assert "the newest complete one is of step 2" in harness.board.fields["learner_trouble"]
    again, trainer = harness.learner()
    assert again.run()
    assert trainer.history == [(step, (2 * step, 2 * step + 1)) for step in range(6)]
    assert harness.buffer.trained == list(range(12))


@pytest.mark.usefixtures("no_waiting")
def test_a_learner_allowed_far_ahead_does_not_wait_for_disk_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.trainer.learner.checkpointing.MAX_UNSAVED_INTERVALS", 2)
    harness = LearnerHarness(tmp_path, learner_config(save_steps=1))
    failures: list[int] = []
    waits: list[int] = []

    def full() -> bool:
        if not trainer.history or len(failures) == 6:
            return False
        failures.append(len(trainer.history))
        return True

    def wait(_: float) -> None:
        if len(failures) < 6:  # later ones are for a slow writer
            waits.append(len(trainer.history))

    learner, trainer = full_disk(harness, full)
    monkeypatch.setattr("offbeat.trainer.learner.checkpointing.time.sleep", wait)
    assert learner.run()
    assert waits
    assert set(waits) == {2}
    assert harness.buffer.trained == list(range(12))


@pytest.mark.usefixtures("no_waiting")
def test_a_stop_is_not_held_up_by_a_full_disk(harness: LearnerHarness) -> None:
    learner, trainer = full_disk(harness, lambda: True)
    learner._should_stop = lambda: len(trainer.history) >= 2
    assert not learner.run()
    assert harness.buffer.trained == []
    assert harness.learner()[0].run()
    assert harness.buffer.trained == list(range(12))


@pytest.mark.usefixtures("no_waiting")
def test_training_continues_while_the_disk_has_no_room_for_a_line(
    harness: LearnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for lines of the step ledger: they are written, in order, before the checkpoint with their steps."""
    learner, trainer = harness.learner()
    append = LinesFile.append

    def append_with_room(lines: LinesFile, rows: Iterable[Mapping[str, Any]]) -> None:
        if len(trainer.history) in (0, 2, 3):
            raise OSError(28, "No space left on device")
        append(lines, rows)

    monkeypatch.setattr(LinesFile, "append", append_with_room)
    acknowledged: list[tuple[int, list[int]]] = []
    train = trainer.train

    def observe(batch: StepBatch) -> dict[str, Partial]:
        acknowledged.append((len(trainer.history), list(harness.buffer.trained)))
        return train(batch)

    trainer.train = observe
    assert learner.run()
    assert acknowledged[4] == (4, [])  # step 3's checkpoint waited for its lines
    assert harness.buffer.trained == list(range(12))
    lines, num_unreadable = read_step_ledger(harness.folder)
    assert [(type(line).__name__, getattr(line, "step", None)) for line in lines] == [
        ("ResumedLine", 0),
        *(("StepLine", step) for step in range(1, 7)),
    ]
    assert num_unreadable == 0
    assert harness.board.fields["learner_trouble"] == ""


def test_a_learner_begins_once_the_disk_has_room_for_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.trainer.process.run_checkpoints.RETRY_INTERVAL_S", 0.0)
    board = DictBoard()
    doing: list[str] = []

    def note() -> None:
        doing.append(board.fields.get("learner_doing", ""))
        if len(doing) < 3:
            raise OSError(28, "No space left on device")
        note_lease(tmp_path, 7)

    reporter = LearnerReporter(ListSink(), board)
    wait_for_room(note, tmp_path, reporter, lambda: False)
    assert "no_room" in doing[2]
    assert newest_epoch(tmp_path) == 7
    assert board.fields["learner_trouble"] == ""
    with pytest.raises(StoppedError):
        wait_for_room(append_to_full_disk, tmp_path, reporter, lambda: True)


def test_refused_lines_are_reported_and_tried_once_more_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    board, append, is_full = DictBoard(), LinesFile.append, [True]

    def append_with_room(lines: LinesFile, rows: Iterable[Mapping[str, Any]]) -> None:
        if is_full:
            append_to_full_disk()
        append(lines, rows)

    monkeypatch.setattr(LinesFile, "append", append_with_room)
    reporter = LearnerReporter(ListSink(), board)
    lost = StepLedger(tmp_path, 1, partial(reporter.set_problem, of="ledger"))
    for step in (3, 4):
        lost.write_resumed(step)
    assert "steps.jsonl can't be written" in board.fields["learner_trouble"]
    assert caplog.text.count("can't be written") == 1
    lost.close()
    assert "2 lines of ledger/steps.jsonl are lost" in caplog.text
    ledger = StepLedger(tmp_path, 2, partial(reporter.set_problem, of="ledger"))
    ledger.write_resumed(5)
    is_full.clear()
    ledger.close()
    assert [line.epoch for line in read_step_ledger(tmp_path)[0]] == [2]
    assert board.fields["learner_trouble"] == ""


def append_to_full_disk() -> None:
    raise OSError(28, "No space left on device")
