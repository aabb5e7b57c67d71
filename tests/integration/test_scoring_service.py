"""A reference in processes of its own: the same weights as with the reference in the learner, whoever is killed."""

import json
import signal
import time
from pathlib import Path
from typing import cast

import pytest
import torch

from offbeat.services.metric_registry import find_metric
from tests.forked import ForkedProcess
from tests.integration.learner_run import ENVIRONMENT, Run, a_run
from tests.waiting import wait_until_sync

pytestmark = pytest.mark.timeout(900)

WAIT_S = 3.0
SCORER = """
import sys
from offbeat.services.telemetry import configure_logging
from offbeat.trainer.scoring.factory import build_scorer
configure_logging("scorer", None)
build_scorer(sys.argv[1], "", "reference", sys.argv[2], sys.argv[3]).run()
"""
PENALTY = ("use_kl_loss=true", "kl_loss_coef=0.5", "save_steps=2")
HF_INFER = "reference.strategy_args.strategy_name=hf_infer"
SERVICE = (*PENALTY, HF_INFER, "reference.strategy_args.placement=service", "buffer.worker_timeout_s=4")


def start_scorer(run: Run, name: str) -> ForkedProcess:
    command = ["-c", SCORER, run.config.exp_name, name, run.url]
    run.learners.append(ForkedProcess(command, env=ENVIRONMENT))  # killed at the end, like a learner
    return run.learners[-1]


def activity(run: Run) -> dict[str, object]:
    raw = cast(bytes | None, run.redis.hget(run.keys.record, "learner_doing"))
    return json.loads(raw or b"{}")


def waits_for_score(run: Run) -> bool:
    """Whether the learner waits for one score for longer than it would wait for one that is there, or train a step."""
    doing = activity(run)
    return doing.get("stage") == "scoring" and time.time() > float(str(doing["since"])) + WAIT_S


def test_a_service_gives_the_weights_of_a_reference_in_the_learner_through_kills(redis_server: str, tmp_path: Path):
    with a_run(redis_server, tmp_path, "inside", PENALTY) as inside:
        assert inside.start().wait(timeout=240) == 0
    with a_run(redis_server, tmp_path, "beside", SERVICE) as run:
        learner = run.start()
        wait_until_sync(lambda: waits_for_score(run), timeout_s=240)
        scorer = start_scorer(run, "a")
        wait_until_sync(lambda: run.published() >= 1, timeout_s=240)
        scorer.send_signal(signal.SIGSTOP)  # at the latest when it holds a group
        wait_until_sync(lambda: waits_for_score(run), timeout_s=240)
        assert activity(run)["roles"] == "reference"
        published = run.published()
        scorer.kill()
        scorer.wait()
        assert run.published() == published, "nothing is trained without its score"
        start_scorer(run, "b")
        wait_until_sync(lambda: run.published() >= 3, timeout_s=240)
        learner.kill()
        learner.wait()
        assert run.start().wait(timeout=240) == 0
        counters = run.counters()
        assert (counters.admitted, counters.trained, counters.in_flight) == (12, 12, 0)
        for name, tensor in inside.weights(6).items():
            assert torch.equal(tensor, run.weights(6)[name]), name
        records = run.records()
        assert [name for r in records for name in r.values if find_metric(r.source, name) is None] == []
        scored = sum(r.values["reference/groups"].total for r in records if r.source == "scoring")
        assert 11 <= scored <= 12, "no group is scored twice"  # a killed scorer may not have reported its last
        waited = [r.values["time/score_wait_s"].total for r in records if r.source == "learner" and r.step]
        assert waited[0] > WAIT_S, "of the first step; a killed learner may not have reported its last"
    with a_run(redis_server, tmp_path, "without", ("save_steps=6",)) as without:
        assert without.start().wait(timeout=240) == 0
        assert any(not torch.equal(t, inside.weights(6)[name]) for name, t in without.weights(6).items())
