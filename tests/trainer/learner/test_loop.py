"""The learner's loop: the order of its stages, and what each step leaves behind."""

import itertools
import math
from pathlib import Path

import pytest

from offbeat.services.errors import ControlError
from offbeat.services.telemetry import Partial
from offbeat.trainer.algorithms.aggregation import MaskedCounts
from offbeat.trainer.learner.step_ledger import StepLine, read_step_ledger
from tests.fakes import Moments, make_group
from tests.trainer.learner.harness import GROUPS_PER_STEP, LearnerHarness, learner_config


def test_groups_train_once_in_stream_order_and_each_step_is_published(harness: LearnerHarness) -> None:
    learner, trainer = harness.learner()
    assert learner.run()
    assert trainer.history == [(step, (2 * step, 2 * step + 1)) for step in range(6)]
    assert list(harness.publisher.versions) == list(range(7))
    assert harness.buffer.trained == list(range(12))
    assert harness.board.fields["learner_phase"] == "finished"
    assert harness.board.fields["learner_step"] == "6"


def test_a_checkpoint_has_the_steps_that_the_next_learner_diagnoses(harness: LearnerHarness) -> None:
    learner, _ = harness.learner()
    assert learner.run()
    successor, _ = harness.learner()
    assert [step["groups"] for step in successor._reporter._steps] == [2.0] * 6


def test_old_groups_join_batches_and_are_accounted_for_once(harness: LearnerHarness) -> None:
    harness.config = learner_config(replay={"samples_per_insert": 2.0, "max_times_sampled": 2, "sampler": "fifo"})
    learner, trainer = harness.learner()
    assert learner.run()
    fresh = [(2 * step, 2 * step + 1) for step in range(6)]
    assert trainer.history == [(0, fresh[0]), *((step, fresh[step] + fresh[step - 1]) for step in range(1, 6))]
    assert harness.buffer.trained == list(range(12))
    lines = [line for line in read_step_ledger(harness.folder)[0] if isinstance(line, StepLine)]
    assert [[group.number for group in line.groups] for line in lines] == [list(pair) for pair in fresh]
    assert [
        record.values["groups_again"].total for record in harness.sink.records if "groups_again" in record.values
    ] == [2] * 5


@pytest.mark.parametrize(("policy", "bound"), [("drop", 100.0), ("train", math.inf)])
def test_the_ledger_has_the_bound_that_groups_had_to_meet(policy: str, bound: float, harness: LearnerHarness) -> None:
    harness.config = learner_config(buffer={"stale_policy": policy}, max_steps=1)
    learner, _ = harness.learner()
    assert learner.run()
    (line,) = [line for line in read_step_ledger(harness.folder)[0] if isinstance(line, StepLine)]
    assert line.max_staleness == bound


def test_groups_are_acknowledged_after_the_checkpoint_with_them(harness: LearnerHarness) -> None:
    moments = Moments()
    learner, _ = harness.learner(moments)
    learner.run()
    order = [name for name in moments.names if name.startswith(("save", "ack", "train"))]
    assert order == [
        *("train 0", "train 1", "train 2", "save", "train 3", "ack 3"),
        *("train 4", "train 5", "save", "ack 6"),
    ]


def test_the_new_version_is_published_before_anything_else_is_done(harness: LearnerHarness) -> None:
    moments = Moments()
    learner, _ = harness.learner(moments)
    learner.run()
    names = moments.names
    for step in range(6):
        assert names[names.index(f"train {step}") + 1] == f"publish {step + 1}"


def test_a_step_without_signal_leaves_its_mark_but_no_gradient(tmp_path: Path) -> None:
    harness = LearnerHarness(tmp_path)
    numbers = itertools.count()
    harness.buffer.on_empty = lambda buffer: buffer.stream.append(make_group(next(numbers), rewards=(1.0, 1.0)))
    learner, trainer = harness.learner()
    assert learner.run()
    assert trainer.history == [(step, ()) for step in range(6)]
    assert trainer.masked == [MaskedCounts(tokens=16, sequences=4, groups=GROUPS_PER_STEP, episodes=4)] * 6
    assert list(harness.publisher.versions) == list(range(7))
    assert harness.buffer.trained == list(range(12))
    assert all(record.values["groups_without_signal"].total == GROUPS_PER_STEP for record in harness.sink.of("learner"))


def test_records_show_what_each_step_consumed(harness: LearnerHarness) -> None:
    learner, _ = harness.learner()
    learner.run()
    records = harness.sink.of("learner")
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6]
    last = records[-1].values
    assert last["success"] == Partial("mean", 2.0, 4.0)
    assert last["reward"] == Partial("mean", 2.0, 4.0)
    assert (last["staleness"].value, last["staleness_max"].value) == (5.0, 5.0)
    assert last["tokens/computed"] == Partial("sum", 10.0)
    assert last["trajectories"] == Partial("sum", 4.0)
    assert {"time/wait_s", "time/train_s", "time/publish_s", "time/step_s"} <= last.keys()


def test_a_value_that_is_not_finite_is_counted_and_left_out(harness: LearnerHarness) -> None:
    learner, trainer = harness.learner()
    trainer.gauges = {"actor/total_loss": Partial("mean", float("nan")), "actor/skipped_steps": Partial("sum", 1.0)}
    with pytest.raises(ControlError, match="not finite in 5 consecutive steps, up to step 5"):
        learner.run()
    values = harness.sink.of("learner")[0].values
    assert "actor/total_loss" not in values
    assert values["not_finite"].total == 1.0
    assert values["actor/skipped_steps"].total == 1.0
    lines, _ = read_step_ledger(harness.folder)
    assert [line.skipped for line in lines if isinstance(line, StepLine)] == [True] * 5


@pytest.mark.parametrize("model", ["actor", "critic"])
def test_one_skipped_minibatch_of_four_is_not_a_skipped_batch(harness: LearnerHarness, model: str) -> None:
    """Its groups are kept, but the weights have changed: neither journal nor audit say that they have not."""
    learner, trainer = harness.learner()
    trainer.gauges = {
        f"{name}/skipped_steps": Partial("sum", float(name == model), 4.0) for name in ("actor", "critic")
    }
    assert learner.run()
    lines, _ = read_step_ledger(harness.folder)
    assert [line.skipped for line in lines if isinstance(line, StepLine)] == [False] * 6
    assert list((harness.folder / "batches").glob("skipped-*"))


def test_a_critic_without_a_finite_gradient_ends_the_run_but_the_policy_was_trained(harness: LearnerHarness) -> None:
    learner, trainer = harness.learner()
    trainer.gauges = {"actor/skipped_steps": Partial("sum", 0.0, 2.0), "critic/skipped_steps": Partial("sum", 2.0, 2.0)}
    with pytest.raises(ControlError, match="not finite in 5 consecutive steps"):
        learner.run()
    lines, _ = read_step_ledger(harness.folder)
    assert [line.skipped for line in lines if isinstance(line, StepLine)] == [False] * 5


def test_steps_that_overflowed_do_not_end_the_run(harness: LearnerHarness) -> None:
    learner, trainer = harness.learner()
    trainer.gauges = {"actor/skipped_steps": Partial("sum", 1.0), "actor/overflow_steps": Partial("sum", 1.0)}
    assert learner.run()
    lines, _ = read_step_ledger(harness.folder)
    assert [line.skipped for line in lines if isinstance(line, StepLine)] == [True] * 6
