"""Evaluations before, during and after training, which continue beside it."""

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.services.telemetry import REWOUND_TO
from offbeat.trainer.training.batch_log import BatchLog
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from tests.fakes import CrashError, Moments
from tests.trainer.learner.harness import LearnerHarness, finish_evaluations, learner_config


def test_evaluations_come_before_during_and_after_training(tmp_path: Path) -> None:
    harness = LearnerHarness(tmp_path, learner_config(eval_steps=2, final_val_batch_size=4))
    finish_evaluations(harness)
    learner, _ = harness.learner()
    assert learner.run()
    found = [
        (r.labels["when"], r.labels["sampling"], r.step, r.values["success"].value) for r in harness.sink.of("eval")
    ]
    assert found == [
        ("before", "sampled", 0, 0.5),
        ("before", "greedy", 0, 0.5),
        ("during", "sampled", 2, 0.5),
        ("during", "sampled", 4, 0.5),
        ("after", "sampled", 6, 0.5),
        ("after", "greedy", 6, 0.5),
    ]
    assert not harness.buffer.evaluations
    assert sorted(path.name for path in (tmp_path / "evaluations").glob("[!.]*"))[0] == "after-greedy-6.jsonl"


def test_the_first_weights_stay_while_they_are_evaluated(tmp_path: Path) -> None:
    harness = LearnerHarness(tmp_path, learner_config(final_val_batch_size=4))
    finish_evaluations(harness, done=False)
    polls = itertools.count()
    learner, trainer = harness.learner(should_stop=lambda: next(polls) > 20)
    assert not learner.run()
    assert list(harness.publisher.versions) == [0]
    assert not trainer.history


def test_an_evaluation_during_training_does_not_stop_it(tmp_path: Path) -> None:
    harness = LearnerHarness(tmp_path, learner_config(eval_steps=2))
    learner, trainer = harness.learner(should_stop=lambda: len(trainer.history) == 6)
    learner.run()
    assert len(trainer.history) == 6
    assert [eval_id for eval_id, *_ in harness.buffer.started] == ["during-sampled-2", "during-sampled-4"]
    assert not harness.sink.of("eval")


def test_evaluations_of_checkpoints_that_are_given_up_are_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their episodes ask for weights that did not survive."""
    harness = LearnerHarness(tmp_path, learner_config(eval_steps=2, save_steps=2))
    learner, trainer = harness.learner(should_stop=lambda: len(trainer.history) == 5)
    learner.run()
    for step in (4, 5):
        shutil.rmtree(tmp_path / "checkpoints" / f"step-{step:06d}", ignore_errors=True)
    reconcile = harness.buffer.reconcile
    monkeypatch.setattr(harness.buffer, "reconcile", lambda proof: replace(reconcile(proof), num_added=-1))
    harness.buffer.started.clear()
    successor, trainer = harness.learner(should_stop=lambda: len(trainer.history) == 3)
    successor.run()
    assert [eval_id for eval_id, *_ in harness.buffer.started] == ["during-sampled-2"]
    finish_evaluations(harness)
    assert harness.learner()[0].run()
    assert [record.step for record in harness.sink.of("eval")] == [2, 4]


def test_a_successor_collects_queued_evaluations_without_repeats(tmp_path: Path) -> None:
    harness = LearnerHarness(tmp_path, learner_config(eval_steps=2))
    with pytest.raises(CrashError):
        harness.learner(Moments(crash_at=8))[0].run()
    assert harness.log.states == {"during-sampled-2": "2"}
    finish_evaluations(harness)
    learner, _ = harness.learner()
    assert learner.run()
    assert [record.step for record in harness.sink.of("eval")] == [2, 4]
    assert set(harness.log.states.values()) == {"recorded"}


def test_a_run_resumed_from_an_earlier_step_evaluates_anew(tmp_path: Path) -> None:
    harness = LearnerHarness(tmp_path, learner_config(eval_steps=2, final_val_batch_size=2))
    finish_evaluations(harness)
    harness.learner()[0].run()
    pending = "after-sampled-9"
    harness.log.put(pending, "2")
    earlier = tmp_path / "checkpoints" / "step-000003"
    harness.config = learner_config(eval_steps=2, final_val_batch_size=2, resume_from_checkpoint=earlier)
    before = len(harness.sink.of("eval"))
    learner, trainer = harness.learner()
    assert len(trainer.history) == 3
    assert learner.run()
    assert pending not in harness.log.states
    assert [r.labels[REWOUND_TO] for r in harness.sink.records if REWOUND_TO in r.labels] == ["3"]
    assert [(r.labels["when"], r.step) for r in harness.sink.of("eval")[before:]] == [
        ("during", 4),
        ("after", 6),
        ("after", 6),
    ]


def test_a_run_resumed_from_an_earlier_step_keeps_no_batch_or_best_of_later_ones(tmp_path: Path) -> None:
    settings = {"record_batches": 9, "console": {"keep_steps": 9}}
    harness = LearnerHarness(tmp_path, learner_config(**settings))
    harness.learner()[0].run()
    store = CheckpointStore(tmp_path / "checkpoints", keep=2, epoch=next(harness.epochs))
    store.score(6, 0.9)
    harness.config = learner_config(**settings, resume_from_checkpoint=tmp_path / "checkpoints" / "step-000003")
    learner, trainer = harness.learner(should_stop=lambda: len(trainer.history) == 4)
    assert BatchLog(tmp_path).steps() == [1, 2, 3, 4, 5, 6]
    learner.run()
    assert BatchLog(tmp_path).steps() == [1, 2, 3, 4]
    assert not (tmp_path / "checkpoints" / "best.json").exists()


def test_a_best_whose_checkpoint_is_damaged_is_forgotten(tmp_path: Path) -> None:
    """Redis may not know of its steps: it was emptied, or has told an earlier successor, which died."""
    harness = LearnerHarness(tmp_path)
    harness.learner()[0].run()
    CheckpointStore(tmp_path / "checkpoints", keep=2, epoch=next(harness.epochs)).score(6, 0.9)
    (tmp_path / "checkpoints" / "step-000006" / "learner.json").unlink()
    learner, trainer = harness.learner(should_stop=lambda: len(trainer.history) == 4)
    learner.run()
    assert not (tmp_path / "checkpoints" / "best.json").exists()


def test_a_run_that_is_resumed_after_its_last_step_only_evaluates(tmp_path: Path) -> None:
    harness = LearnerHarness(tmp_path)
    harness.learner()[0].run()
    harness.config = learner_config(final_val_batch_size=2)
    finish_evaluations(harness)
    learner, trainer = harness.learner()
    before = list(trainer.history)
    assert learner.run()
    assert trainer.history == before
    assert [record.labels["when"] for record in harness.sink.of("eval")] == ["after", "after"]
