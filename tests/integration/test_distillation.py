"""Teachers in the learner, in files and in a service of their own give the same weights, whoever is killed."""

import math
from pathlib import Path

import pytest
import torch

from offbeat.deploy.cli.distill import prepare_run
from tests.forked import ForkedProcess
from tests.integration.data_run import a_data_run
from tests.integration.learner_run import ENVIRONMENT, Run
from tests.waiting import wait_until_sync

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCORER = """
import sys
from offbeat.services.generation.vllm.prompt_logprobs import PromptLogprobs
from offbeat.trainer.scoring.factory import build_scorer
build_scorer(sys.argv[1], "", "teacher.lake", sys.argv[2], sys.argv[3], PromptLogprobs).run()
"""
MOST_PROBABLE = ("distill.logits_topk=5", "distill.distill_on_prompt=true", "distill.kd_objective=js_divergence")
IN_SERVICE = ("teacher.lake.strategy_args.placement=service", "data.val_dataset_name=null", "eval_steps=0")
BY_VLLM = (*IN_SERVICE, "teacher.lake.strategy_args.strategy_name=vllm")
IN_FILES = ("teacher.lake.strategy_args.placement=files",)


def start_scorer(run: Run, name: str) -> ForkedProcess:
    command = ["-c", SCORER, run.config.exp_name, name, run.url]
    run.learners.append(ForkedProcess(command, env=ENVIRONMENT))  # killed at the end, like a learner
    return run.learners[-1]


def distance(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((tensor - two[name]).square().sum()) for name, tensor in one.items()))


def test_teachers_give_the_same_weights_wherever_they_are(redis_server: str, tmp_path: Path) -> None:
    with a_data_run(redis_server, tmp_path, "inside", "distill", MOST_PROBABLE) as inside:
        assert inside.start().wait(timeout=240) == 0, inside.complaint()
        earlier, expected = inside.weights(4), inside.weights(6)
    with a_data_run(redis_server, tmp_path, "beside", "distill", (*MOST_PROBABLE, *IN_SERVICE)) as run:
        scorer, learner = start_scorer(run, "a"), run.start()
        wait_until_sync(lambda: run.published() >= 2, timeout_s=240)
        scorer.kill()
        scorer.wait()
        start_scorer(run, "b")
        assert learner.wait(timeout=240) == 0, run.complaint()
        for name, tensor in expected.items():
            assert torch.equal(tensor, run.weights(6)[name]), name
    with a_data_run(redis_server, tmp_path, "served", "distill", (*MOST_PROBABLE, *BY_VLLM)) as run:
        start_scorer(run, "a")
        assert run.start().wait(timeout=240) == 0, run.complaint()
        # Adam turns the last bit of a small gradient into a step: what was learned is compared, not each weight
        assert distance(run.weights(6), expected) < 0.01 * distance(expected, earlier)
    with a_data_run(redis_server, tmp_path, "written", "distill", (*MOST_PROBABLE, *IN_FILES)) as run:
        assert run.start().wait(timeout=240) != 0
        assert "no scores of 20 of 20 rows" in run.complaint()
        assert prepare_run(run.config) == {"teacher.lake": 25}
        assert prepare_run(run.config) == {"teacher.lake": 0}, "it continues where it was"
        assert run.start().wait(timeout=240) == 0, run.complaint()
        for name, tensor in expected.items():
            assert torch.equal(tensor, run.weights(6)[name]), name


TINY = ("teacher.lake.model_args.model_name_or_path=tiny", "max_steps=2", "save_steps=2")


@pytest.mark.nightly
def test_a_tiny_teacher_is_the_same_model_wherever_it_is(redis_server: str, tmp_path: Path) -> None:
    """And another one than the policy, which it would have nothing to teach."""
    with a_data_run(redis_server, tmp_path, "inside", "distill", TINY) as inside:
        assert inside.start().wait(timeout=240) == 0, inside.complaint()
        expected = inside.weights(2)
        divergences = [each.values["kd_loss"].value for each in inside.records() if "kd_loss" in each.values]
    assert all(divergence > 0.01 for divergence in divergences)
    with a_data_run(redis_server, tmp_path, "beside", "distill", (*TINY, *IN_SERVICE)) as run:
        start_scorer(run, "a")
        assert run.start().wait(timeout=240) == 0, run.complaint()
        for name, tensor in expected.items():
            assert torch.equal(tensor, run.weights(2)[name]), name
    with a_data_run(redis_server, tmp_path, "written", "distill", (*TINY, *IN_FILES)) as run:
        assert prepare_run(run.config) == {"teacher.lake": 25}
        assert run.start().wait(timeout=240) == 0, run.complaint()
        for name, tensor in expected.items():
            assert torch.equal(tensor, run.weights(2)[name]), name
