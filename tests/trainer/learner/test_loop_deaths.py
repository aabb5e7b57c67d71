"""What survives a learner's death at any moment, a stop, and a newer learner."""

import itertools
import json
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offbeat.deploy.audit.lineage import trace
from offbeat.services.errors import FencedError
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.learner.step_ledger import StepLine, read_step_ledger
from offbeat.trainer.training.checkpoint import LearnerState
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from offbeat.trainer.training.optimizer_step import Gauges
from tests.fakes import CrashError, FakeLearnerBuffer, FakeTrainer, Moments, make_group
from tests.trainer.learner.harness import (
    GROUPS_PER_STEP,
    LearnerHarness,
    learner_config,
    run_until_crash,
)

pytestmark = pytest.mark.slow
MEMORY = "/dev/shm"
"""Where hundreds of lives write: on a disk, they would wait for it most of the time."""
REPLAY = {"samples_per_insert": 2.5, "max_times_sampled": 3}
CURRICULUM = {
    "custom_envs": {name: {"env_type": "frozen_lake"} for name in ("tag", "hard")},
    "train_env_manager": {
        "group_size": 2,
        "task_sampler": {"path": "offbeat.envs.task_samplers:Levels", "args": {"window": 100}},
    },
}


@settings(max_examples=60, deadline=None)
@given(
    crashes=st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=4),
    replay=st.sampled_from([{}, REPLAY, REPLAY | {"sampler": "prioritized"}]),
    frequency=st.sampled_from([1, 2, 4]),
)
def test_a_learner_killed_anywhere_gives_the_weights_of_an_intact_one(
    crashes: list[tuple[int, bool]], replay: dict[str, object], frequency: int
) -> None:
    config = learner_config(replay=replay, model_update_frequency=frequency, **CURRICULUM)
    with TemporaryDirectory(dir=MEMORY) as one, TemporaryDirectory(dir=MEMORY) as two:
        undisturbed = LearnerHarness(Path(one), config)
        learner, expected = undisturbed.learner()
        learner.run()
        harness = LearnerHarness(Path(two), config)
        for crash_at, after in crashes:
            learner, trainer = run_until_crash(harness, Moments(crash_at, after))
        learner, trainer = harness.learner()
        assert learner.run()
    assert trainer.history == expected.history
    assert harness.publisher.versions == undisturbed.publisher.versions
    assert harness.buffer.trained == list(range(12))
    assert not harness.buffer.dropped
    assert harness.buffer.taught[-1] == undisturbed.buffer.taught[-1]
    assert len(json.loads(harness.buffer.taught[-1])["seen"]) == 12


REFILL = {"zero_variance": "refill", "max_refill_ratio": 1.0}


def fill_with(harness: LearnerHarness, signals: str) -> None:
    """Let groups come of which `signals` says, over and over, whether they have a signal."""
    numbers = itertools.count()

    def fill(buffer: FakeLearnerBuffer) -> None:
        number = next(numbers)
        has_signal = signals[number % len(signals)] == "1"
        buffer.stream.append(make_group(number, rewards=(0.0, 1.0) if has_signal else (1.0, 1.0)))

    harness.buffer.on_empty = fill


def record_rewards(trainer: FakeTrainer, batches: dict[int, object]) -> None:
    """Keep what a learner's last try of each step got."""
    train = trainer.train

    def train_and_record(batch: StepBatch) -> Gauges:
        batches[batch.step] = ([group.number for group in batch.groups], dict(batch.rewards_by_tag), batch.masked)
        return train(batch)

    trainer.train = train_and_record


@settings(max_examples=60, deadline=None)
@given(
    crashes=st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=4),
    signals=st.sampled_from(["00011", "011", "0001", "01"]),
)
@example(crashes=[(14, False)], signals="00011")
def test_a_learner_killed_anywhere_refills_the_same_groups_again(crashes: list[tuple[int, bool]], signals: str) -> None:
    """At the cap, too: of five groups two are refilled, one is masked, and two have a signal."""
    config = learner_config(**REFILL, **CURRICULUM)
    with TemporaryDirectory(dir=MEMORY) as one, TemporaryDirectory(dir=MEMORY) as two:
        undisturbed, harness = LearnerHarness(Path(one), config), LearnerHarness(Path(two), config)
        fill_with(undisturbed, signals)
        fill_with(harness, signals)
        expected, batches = dict[int, object](), dict[int, object]()
        learner, trainer = undisturbed.learner()
        record_rewards(trainer, expected)
        learner.run()
        for crash_at, after in crashes:
            with suppress(CrashError):
                learner, trainer = harness.learner(Moments(crash_at, after))
                record_rewards(trainer, batches)
                learner.run()
        learner, trainer = harness.learner()
        record_rewards(trainer, batches)
        assert learner.run()
        lines, _ = read_step_ledger(harness.folder)
    assert batches == expected
    assert trace(lines).findings == []
    assert any(isinstance(line, StepLine) and line.refilled for line in lines)
    assert harness.buffer.trained == undisturbed.buffer.trained
    assert harness.buffer.dropped == undisturbed.buffer.dropped
    assert harness.buffer.taught[-1] == undisturbed.buffer.taught[-1]


def test_a_stopped_learner_leaves_a_checkpoint_of_its_last_whole_step(harness: LearnerHarness) -> None:
    learner, trainer = harness.learner(should_stop=lambda: len(trainer.history) >= 2)
    assert not learner.run()
    assert harness.buffer.trained == [0, 1, 2, 3]
    resumed, again = harness.learner()
    assert resumed.run()
    assert again.history == [(step, (2 * step, 2 * step + 1)) for step in range(6)]


def test_a_learner_stopped_before_its_first_step_writes_nothing(harness: LearnerHarness) -> None:
    learner, _ = harness.learner(should_stop=lambda: True)
    assert not learner.run()
    assert not list((harness.folder / "checkpoints").glob("step-*"))


def test_what_was_left_behind_never_stands_for_what_is_trained_now(tmp_path: Path) -> None:
    """A run went back from step 3 to step 1, and now continues from there."""
    left, back = FakeTrainer(), FakeTrainer()
    for trainer, numbers in ((left, (40, 41, 42)), (back, (50,))):
        for step, number in enumerate(numbers):
            trainer.train(StepBatch(step, (group := make_group(number),), (group,)))
    store = CheckpointStore(tmp_path / "checkpoints", keep=9, epoch=1)
    store.save(LearnerState(3, "now"), left.save).result()
    store.save(LearnerState(1, "now/2"), back.save).result()
    config = learner_config(resume_from_checkpoint=True, max_steps=4)
    harness = LearnerHarness(tmp_path, config, epochs=itertools.count(2))
    learner, trainer = harness.learner()
    assert trainer.history == back.history
    assert learner.run()
    again = FakeTrainer()
    again.load(tmp_path / "checkpoints" / "step-000003", 0.0, lambda *_: None, lambda: False)
    assert again.history == trainer.history[:3]


def test_a_fenced_learner_neither_saves_nor_acknowledges(harness: LearnerHarness) -> None:
    learner, _ = harness.learner()

    def refuse(*_: object) -> None:
        raise FencedError("a newer learner holds the run")

    harness.publisher.publish = refuse
    with pytest.raises(FencedError):
        learner.run()
    assert not harness.buffer.trained
    assert not list((harness.folder / "checkpoints").glob("step-*"))


def test_resuming_makes_the_ledger_agree_with_the_checkpoint(harness: LearnerHarness) -> None:
    learner, trainer = harness.learner(should_stop=lambda: len(trainer.history) >= 3)
    learner.run()
    resumed, _ = harness.learner()
    assert resumed.run()
    assert harness.buffer.restored == [(0, 0), (3 * GROUPS_PER_STEP, 6)]


def test_the_journal_holds_every_step_of_every_life_and_its_groups(harness: LearnerHarness) -> None:
    run_until_crash(harness, Moments(crash_at=15))
    learner, trainer = harness.learner()
    assert learner.run()
    lines, broken = read_step_ledger(harness.folder)
    lineage = trace(lines)
    assert (broken, lineage.findings, lineage.learners, lineage.last) == (0, [], 2, 6)
    assert lineage.repeated > 0
    assert [(line.step - 1, tuple(g.number for g in line.groups)) for line in lineage.steps] == trainer.history
