"""Evaluations before, during and after training, which go on beside it."""

import itertools
from pathlib import Path

import pytest

from tests.fakes import CrashError, Moments
from tests.trainer.learner.harness import World, evaluating, learner_config


def test_evaluations_come_before_during_and_after_training(tmp_path: Path) -> None:
    world = World(tmp_path, learner_config(eval_steps=2, final_val_batch_size=4))
    evaluating(world)
    learner, _ = world.learner()
    assert learner.run()
    found = [(r.labels["when"], r.labels["sampling"], r.step, r.values["success"].value) for r in world.sink.of("eval")]
    assert found == [
        ("before", "sampled", 0, 0.5),
        ("before", "greedy", 0, 0.5),
        ("during", "sampled", 2, 0.5),
        ("during", "sampled", 4, 0.5),
        ("after", "sampled", 6, 0.5),
        ("after", "greedy", 6, 0.5),
    ]
    assert not world.buffer.evaluations
    assert sorted(path.name for path in (tmp_path / "evaluations").iterdir())[0] == "after-greedy-6.jsonl"


def test_the_first_weights_stay_while_they_are_evaluated(tmp_path: Path) -> None:
    world = World(tmp_path, learner_config(final_val_batch_size=4))
    evaluating(world, done=False)
    polls = itertools.count()
    learner, trainer = world.learner(stopped=lambda: next(polls) > 20)
    assert not learner.run()
    assert list(world.publisher.versions) == [0]
    assert not trainer.history


def test_an_evaluation_during_training_does_not_stop_it(tmp_path: Path) -> None:
    world = World(tmp_path, learner_config(eval_steps=2))
    learner, trainer = world.learner(stopped=lambda: len(trainer.history) == 6)
    learner.run()
    assert len(trainer.history) == 6
    assert [eval_id for eval_id, *_ in world.buffer.started] == ["during-sampled-2", "during-sampled-4"]
    assert not world.sink.of("eval")


def test_a_replaced_learner_collects_what_the_last_one_had_queued_and_repeats_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, learner_config(eval_steps=2))
    with pytest.raises(CrashError):
        world.learner(Moments(crash_at=8))[0].run()
    assert world.log.states == {"during-sampled-2": "2"}
    evaluating(world)
    learner, _ = world.learner()
    assert learner.run()
    assert [record.step for record in world.sink.of("eval")] == [2, 4]
    assert set(world.log.states.values()) == {"recorded"}


def test_a_run_that_goes_back_to_an_earlier_step_evaluates_what_it_trains_from_there(tmp_path: Path) -> None:
    world = World(tmp_path, learner_config(eval_steps=2, final_val_batch_size=2))
    evaluating(world)
    world.learner()[0].run()
    pending = "after-sampled-9"
    world.log.put(pending, "2")
    earlier = tmp_path / "checkpoints" / "step-000003"
    world.config = learner_config(eval_steps=2, final_val_batch_size=2, resume_from_checkpoint=earlier)
    before = len(world.sink.of("eval"))
    learner, trainer = world.learner()
    assert len(trainer.history) == 3
    assert pending not in world.log.states
    assert learner.run()
    assert [(r.labels["when"], r.step) for r in world.sink.of("eval")[before:]] == [
        ("during", 4),
        ("after", 6),
        ("after", 6),
    ]


def test_a_run_that_is_resumed_after_its_last_step_only_evaluates(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.learner()[0].run()
    world.config = learner_config(final_val_batch_size=2)
    evaluating(world)
    learner, trainer = world.learner()
    before = list(trainer.history)
    assert learner.run()
    assert trainer.history == before
    assert [record.labels["when"] for record in world.sink.of("eval")] == ["after", "after"]
