"""Batches are recorded and read unchanged, the newest are kept, and a failed write is reported before a checkpoint."""

from contextlib import suppress
from pathlib import Path

import pytest

from offbeat.services.errors import CodecError, FencedError
from offbeat.trainer.algorithms.aggregation import MaskedCounts
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.training.batch_log import BatchLog
from tests.fakes import make_group

CONFIG = AlgorithmConfig()


def batch_of(step: int, *numbers: int) -> StepBatch:
    return StepBatch.build(step, [make_group(number) for number in numbers or (step,)], CONFIG)


def test_a_batch_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    log = BatchLog(tmp_path, max_kept=2)
    groups = [make_group(3), make_group(1)]
    log.record(StepBatch.build(6, groups, CONFIG, masked=MaskedCounts(9, 2), weights=(1.0, 0.5)), 5e-4)
    log.flush()
    recorded = log.read(7, CONFIG)
    batch = recorded.batch
    assert (recorded.learning_rate, batch.step, batch.masked, batch.weights) == (
        5e-4,
        6,
        MaskedCounts(9, 2),
        (1.0, 0.5),
    )
    assert [(group.number, group.oldest_version, len(group.trajectories)) for group in batch.groups] == [
        (3, 0, 2),
        (1, 0, 2),
    ]


def test_rewards_are_shaped_again_when_a_batch_is_read(tmp_path: Path) -> None:
    config = AlgorithmConfig.model_validate({"reward_shaping": {"response_length_penalty_coef": 0.5}})
    log, batch = BatchLog(tmp_path, max_kept=1), StepBatch.build(0, [make_group(0)], config)
    log.record(batch, 1e-3)
    log.flush()
    (raw,), (shaped,) = (
        [[trajectory.reward for trajectory in group.trajectories] for group in groups]
        for groups in (log.read(1, config).batch.groups, log.read(1, config).batch.shaped)
    )
    assert raw == [trajectory.reward for trajectory in batch.groups[0].trajectories]
    assert shaped == [trajectory.reward for trajectory in batch.shaped[0].trajectories] != raw


def test_the_newest_batches_and_all_skipped_ones_are_kept(tmp_path: Path) -> None:
    log = BatchLog(tmp_path, max_kept=2)
    for step in range(4):
        log.record(batch_of(step), 1e-3)
        if step == 1:
            log.record_skipped(batch_of(step), 1e-3)
    log.flush()
    assert log.steps() == [3, 4]
    assert [path.name for path in (tmp_path / "batches").glob("skipped*")] == ["skipped-000002.msgpack"]


def test_the_newest_batches_are_kept_beyond_a_million_steps(tmp_path: Path) -> None:
    log = BatchLog(tmp_path, max_kept=2)
    for step in range(999_997, 1_000_001):
        log.record(batch_of(step, 1), 1e-3)
    log.flush()
    assert log.steps() == [1_000_000, 1_000_001]


def test_a_learner_that_was_replaced_neither_writes_nor_removes_batches(tmp_path: Path) -> None:
    stopped, successor = BatchLog(tmp_path, max_kept=2, epoch=1), BatchLog(tmp_path, max_kept=2, epoch=2)
    for step in range(6):
        stopped.record(batch_of(step), 1e-3)
    stopped.flush()
    for step in (2, 3):
        successor.record(batch_of(step, 100 + step), 1e-3)
        successor.flush()
    kept = successor.steps()
    assert {3, 4} <= set(kept), "the steps that the successor repeats are not older than those of the learner before"
    stopped.record(batch_of(6), 1e-3)
    with pytest.raises(FencedError):
        stopped.flush()
    assert successor.steps() == kept
    assert [group.number for group in successor.read(4, CONFIG).batch.groups] == [103]


def test_nothing_is_recorded_by_default(tmp_path: Path) -> None:
    log = BatchLog(tmp_path)
    log.record(batch_of(0), 1e-3)
    log.flush()
    assert not (tmp_path / "batches").exists()


def test_flush_reports_a_failed_write(tmp_path: Path) -> None:
    (tmp_path / "batches").write_text("in the way")
    log = BatchLog(tmp_path, max_kept=2)
    log.record(batch_of(0), 1e-3)
    for _ in range(2):
        with pytest.raises(OSError, match="batches"):
            log.flush()
    (tmp_path / "batches").unlink()
    with suppress(OSError):  # an attempt may have begun while the file was in the way
        log.flush()
    log.flush()
    assert log.steps() == [1]


@pytest.mark.parametrize("damage", [b"", b"\x93\x01\x02\x03", None])
def test_a_damaged_batch_is_rejected_with_its_path(tmp_path: Path, damage: bytes | None) -> None:
    log = BatchLog(tmp_path, max_kept=2)
    log.record(batch_of(3), 1e-3)
    log.flush()
    path = tmp_path / "batches" / "step-000004.msgpack"
    path.write_bytes(path.read_bytes()[:-3] if damage is None else damage)
    with pytest.raises(CodecError, match=r"step-000004.msgpack is no recorded batch"):
        log.read(4, CONFIG)
