"""Recorded batches: what `train` got comes back, the newest are kept, and a checkpoint waits for them."""

from pathlib import Path

import pytest

from offbeat.services.errors import CodecError
from offbeat.services.telemetry import Partial
from offbeat.trainer.algorithms.aggregation import MaskedCounts
from offbeat.trainer.training.batch_log import BatchLog, RecordedBatch, RecordingTrainer
from tests.fakes import FakeTrainer, make_group


def test_what_train_was_called_with_comes_back(tmp_path: Path) -> None:
    store = BatchLog(tmp_path, keep=2)
    trainer = RecordingTrainer(FakeTrainer(), store, 1e-3, every=True)
    trainer.set_learning_rate(5e-4)
    trainer.train([make_group(3), make_group(1)], 6, MaskedCounts(9, 2), (1.0, 0.5))
    trainer.settle()
    batch = store.read(7)
    assert (batch.step, batch.learning_rate, batch.silent, batch.weights) == (7, 5e-4, MaskedCounts(9, 2), (1.0, 0.5))
    assert [(group.number, group.oldest_version, len(group.trajectories)) for group in batch.groups] == [
        (3, 0, 2),
        (1, 0, 2),
    ]


def test_the_newest_are_kept_and_all_without_a_finite_gradient(tmp_path: Path) -> None:
    store, fake = BatchLog(tmp_path, keep=2), FakeTrainer()
    trainer = RecordingTrainer(fake, store, 1e-3, every=True)
    for step in range(4):
        fake.gauges = {"actor/skipped_steps": Partial("sum", float(step == 1))}
        trainer.train([make_group(step)], step)
    trainer.save(tmp_path)
    assert store.steps() == [3, 4]
    assert [path.name for path in (tmp_path / "batches").glob("skipped*")] == ["skipped-000002.msgpack"]


def test_nothing_is_kept_unless_it_is_asked_for(tmp_path: Path) -> None:
    trainer = RecordingTrainer(FakeTrainer(), BatchLog(tmp_path), 1e-3, every=False)
    trainer.train([make_group(0)], 0)
    trainer.save(tmp_path)
    assert not (tmp_path / "batches").exists()


def test_no_checkpoint_is_written_before_its_batches_are(tmp_path: Path) -> None:
    (tmp_path / "batches").write_text("in the way")
    trainer = RecordingTrainer(FakeTrainer(), BatchLog(tmp_path, keep=2), 1e-3, every=True)
    trainer.train([make_group(0)], 0)
    with pytest.raises(OSError, match="batches"):
        trainer.save(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("harm", [b"", b"\x93\x01\x02\x03", None])
def test_a_damaged_one_is_refused_by_name(tmp_path: Path, harm: bytes | None) -> None:
    store = BatchLog(tmp_path, keep=2)
    store.write(RecordedBatch(4, 1e-3, (make_group(0),)))
    path = tmp_path / "batches" / "step-000004.msgpack"
    path.write_bytes(path.read_bytes()[:-3] if harm is None else harm)
    with pytest.raises(CodecError, match=r"step-000004.msgpack is no recorded batch"):
        store.read(4)
