"""What recorded steps are trained under when they are reproduced."""

from pathlib import Path

import pytest

from offbeat.deploy.config.loader import load_run
from offbeat.services.errors import ControlError
from offbeat.trainer.config.run import LearnerRunConfig
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.checkpoint import Checkpoint, LearnerState
from offbeat.trainer.training.reproduction import ReproductionPlan, split_plan
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
