"""Checkpoints of other numbers of processes."""

from pathlib import Path

import pytest

from offbeat.services.errors import ControlError
from offbeat.trainer.process.run_checkpoints import check_processes
from offbeat.trainer.training.checkpoint import Checkpoint, LearnerState
from tests.trainer.learner.harness import learner_config

STAGE_0 = {"strategy_args": {"zero_stage": 0}}


@pytest.mark.parametrize(
    ("train", "critic", "says"),
    [
        ("float32", "float32", None),
        ("float32", None, None),
        ("float32", "bfloat16", "the critic in .*step-000001 was written by 2 process.* set critic.num_processes to 2"),
        ("bfloat16", "float32", "was written by 2 process.*actor_train.num_processes"),
    ],
)
def test_each_optimizer_is_sharded_by_its_models_dtype(train: str, critic: str | None, says: str | None) -> None:
    config = learner_config(
        actor_train={"model_args": {"dtype": train}, **STAGE_0},
        adv_estimator="gae",
        reward_normalization={"method": "identity"},
        critic={"model_args": {"dtype": critic}} if critic else {},
    )
    checkpoint = Checkpoint(Path("step-000001"), LearnerState(1, "now", num_processes=2))
    check_processes(config, checkpoint, 2, 0)
    if says is None:
        check_processes(config, checkpoint, 1, 0)
        return
    with pytest.raises(ControlError, match=says):
        check_processes(config, checkpoint, 1, 0)
