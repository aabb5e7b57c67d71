"""A whole RLVR run whose two rewards are normalized apart; the learner and a reward's replica are killed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.deploy.cli.audit import examine
from offbeat.deploy.config.loader import load_run
from offbeat.envs.dataset.arithmetic import write_problems
from offbeat.services.rollout.data.prompts import PromptSource
from offbeat.trainer.algorithms.normalization import EPS
from offbeat.trainer.config.run import LearnerRunConfig
from offbeat.trainer.training.batch_log import BatchLog
from tests.integration.mesh import HF_INFER, SHORT, TrainProcess, left_behind
from tests.paths import CONFIGS

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]

STEPS = 8
RECORDED = "record_batches=100"
WEIGHTS = {"reward/answer": 1.0, "reward/boxed": 0.1}
SERVED = "{name: boxed, kind: regex, pattern: boxed, weight: 0.1, num_replicas: 1, cpus_per_replica: 0.25}"
REWARDS = f"rewards=[{{name: answer, kind: math_rule}},{SERVED}]"


@pytest.fixture
def train(tmp_path: Path) -> Iterator[TrainProcess]:
    for name, held_out in (("rows", False), ("val", True)):
        write_problems(tmp_path / f"{name}.jsonl", held_out=held_out)
    files = (f"data.dataset_name={tmp_path / 'rows.jsonl'}", f"data.val_dataset_name={tmp_path / 'val.jsonl'}")
    # Every group has a signal, so that a step is 8 groups
    always = ("zero_variance=train", "~max_refill_ratio", f"max_steps={STEPS}", REWARDS, "adv_estimator=gdpo", RECORDED)
    process = TrainProcess(tmp_path / "run", *files, *always, HF_INFER, config=CONFIGS / "rlvr.yaml", small=SHORT)
    yield process
    process.close()


def test_killed_learner_and_reward_replica_lose_no_group(train: TrainProcess, tmp_path: Path):
    """Each validation row is answered once; each reward is a column; every group is trained once."""
    train.wait_for_step(2)
    train.kill("offbeat.trainer.cli")
    train.wait_for_step(4)
    train.kill("ray::ServeReplica:reward-rlvr:boxed")
    assert train.wait() == 0, train.output
    report = train.report()
    assert (report["pipeline"], report["steps"], report["groups_trained"]) == ("rlvr", STEPS, STEPS * 8)
    assert report["groups_failed"] == {}, "a reward that is away is asked again"
    found, _ = examine(train.output_dir)
    assert found.proven, found.findings
    assert found.lineage.learners == 2
    assert left_behind(train) == []
    assert_rows_are_those_of_the_seed(train.output_dir)
    num_rows = sum(1 for _ in (tmp_path / "val.jsonl").open())
    for evaluation in report["evaluations"]:
        metrics = evaluation["metrics"]
        num_answers = num_rows * (4 if evaluation["sampling"] == "sampled" else 1)
        assert (metrics["episodes"], metrics["episodes_failed"]) == (num_answers, 0)
        assert metrics["reward"] == pytest.approx(metrics["reward/answer"] + 0.1 * metrics["reward/boxed"])
        assert metrics["success"] == metrics["reward/answer"]
    records = [json.loads(line) for line in (train.output_dir / "metrics.jsonl").read_text().splitlines()]
    names = {name for record in records if record["source"] == "learner" for name in record["values"]}
    assert {f"env/{tag}/reward/{name}" for tag in ("addition", "mixed") for name in ("answer", "boxed")} <= names
    last = {r["step"]: r["values"] for r in records if r["source"] == "learner" and "advantage/max" in r["values"]}
    assert sorted(last) == list(range(1, STEPS + 1))
    for step, values in last.items():
        expected = decoupled_advantages(train.output_dir, step)
        got = [values[f"advantage/{name}"] for name in ("min", "max")]
        assert got == pytest.approx([expected.min(), expected.max()], rel=1e-5, abs=1e-6)


def assert_rows_are_those_of_the_seed(folder: Path) -> None:
    """Each group is of the row that its number has in an undisturbed run, and no number is trained twice."""
    config = load_run(folder / "config.yaml", [])
    assert config.data is not None
    tags = config.train_env_manager.tags_of(config.custom_envs)
    source = PromptSource(config.data, tags, tags, seed=config.seed)
    groups = [g for step in range(1, STEPS + 1) for g in BatchLog(folder).read(step, LearnerRunConfig()).batch.groups]
    assert len({group.number for group in groups}) == len(groups) == STEPS * 8
    for group in groups:
        task = source.train_task(group.number)
        assert {(each.tag, each.seed) for each in group.trajectories} == {(task.tag, task.seed)}


def decoupled_advantages(folder: Path, step: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """GDPO of a recorded batch: each reward against its group's mean, weighted sums over their deviation."""
    recorded = BatchLog(folder).read(step, LearnerRunConfig())
    sums: list[float] = []
    for group in recorded.batch.groups:
        values = np.array([[each.metrics[name] for name in WEIGHTS] for each in group.trajectories])
        sums += ((values - values.mean(0)) @ np.array([*WEIGHTS.values()])).tolist()
    total = np.array(sums)
    deviation = np.sqrt((total**2).sum() / (len(total) - 1))  # hardly above EPS where nearly all answers are alike
    return total / (deviation + EPS)
