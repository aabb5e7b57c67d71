"""A disk without room for a checkpoint: training continues, nothing is lost, nothing is acknowledged too early."""

from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.trainer.learner.loop import Learner
from tests.fakes import CrashError, FakeTrainer, Moments
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
