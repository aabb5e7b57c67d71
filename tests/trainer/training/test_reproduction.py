"""What recorded steps are trained under when they are reproduced."""

from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.deploy.config.loader import load_run
from offbeat.services.errors import ControlError
from offbeat.trainer.config.run import LearnerRunConfig
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.checkpoint import Checkpoint, LearnerState, RemoteCheckpoint
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from offbeat.trainer.training.reproduction import ReproductionPlan, find_plan, split_plan
from tests.paths import QUICKSTART


def checkpoint(step: int, *overrides: str) -> Checkpoint:
    config = LearnerRunConfig.model_dump(load_run(QUICKSTART, overrides), mode="json") if overrides else {}
    return Checkpoint(Path(f"step-{step:06d}"), LearnerState(step, "now", config=config))


def plan_to(last: int, *checkpoints: Checkpoint) -> ReproductionPlan:
    return ReproductionPlan(checkpoint(0), tuple(range(1, last + 1)), {each.state.step: each for each in checkpoints})


RUN = LearnerRun("run", "now", Path("runs/run"), load_run(QUICKSTART, ["max_steps=9"]))


def test_each_step_has_the_keys_of_the_checkpoint_after_it():
    before = checkpoint(2, "max_steps=4", "pretrain=tiny")
    segments = split_plan(RUN, plan_to(5, before, checkpoint(4, "max_steps=8")))
    assert [(each.run.config.max_steps, each.start.state.step, each.steps) for each in segments] == [
        (4, 0, [1, 2]),
        (8, 2, [3, 4]),
        (9, 4, [5]),
    ]


def test_a_checkpoint_of_an_earlier_build_has_the_runs_keys():
    (segment,) = split_plan(RUN, plan_to(3, checkpoint(2)))
    assert (segment.run, segment.steps) == (RUN, [1, 2, 3])


def test_a_function_that_only_a_checkpoint_names_is_not_called():
    foreign = checkpoint(2, "max_steps=4")
    foreign.state.config["reward_shaping"] = {"function": "os:abort"}
    with pytest.raises(ControlError, match="was trained with os:abort, which the run's configuration does not name"):
        split_plan(RUN, plan_to(2, foreign))


def test_a_plan_has_no_checkpoint_that_the_run_has_given_up(tmp_path: Path) -> None:
    """Step 20 was trained before the run went back to step 10, and is not reached from step 15."""
    run = replace(RUN, output_dir=tmp_path)
    for epoch, lineage, steps in ((1, "first", (10, 20)), (2, "second", (15,))):
        store = CheckpointStore(run.checkpoints, keep=3, epoch=epoch)
        for step in steps:
            store.save(LearnerState(step, lineage), lambda _: None).result()
    (tmp_path / "batches").mkdir()
    for step in range(11, 21):
        (tmp_path / "batches" / f"step-{step:06d}.msgpack").touch()
    plan = find_plan(run, None)
    assert (plan.start.state.step, plan.steps, list(plan.checkpoints)) == (10, (11, 12, 13, 14, 15), [15])


def test_checkpoints_in_a_store_alone_are_named(tmp_path: Path) -> None:
    run = replace(RUN, output_dir=tmp_path)
    store = CheckpointStore(run.checkpoints, keep=3, epoch=1)
    store.save(LearnerState(1, "now"), lambda _: None).result()
    store.note_elsewhere([RemoteCheckpoint("step-000001.000001-000001", 1, "now", 1, 1)], "s3://bucket/run")
    store.release("step-000001").result()
    (tmp_path / "batches").mkdir()
    (tmp_path / "batches" / "step-000002.msgpack").touch()
    with pytest.raises(ControlError, match=r"in s3://bucket/run alone are step-000001.000001-000001: download"):
        find_plan(run, 2)
