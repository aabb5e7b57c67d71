"""A whole RLVR run with a served reward, whose learner and reward replica are killed."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.deploy.cli.audit import examine
from offbeat.envs.dataset.arithmetic import write_problems
from tests.integration.mesh import SHORT, TrainProcess, left_behind
from tests.paths import CONFIGS

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]

STEPS = 8
SERVED = "{name: boxed, kind: regex, pattern: boxed, weight: 0.1, num_replicas: 1, cpus_per_replica: 0.25}"
REWARDS = f"rewards=[{{name: answer, kind: math_rule}},{SERVED}]"


@pytest.fixture
def train(tmp_path: Path) -> Iterator[TrainProcess]:
    for name, held_out in (("rows", False), ("val", True)):
        write_problems(tmp_path / f"{name}.jsonl", held_out=held_out)
    files = (f"data.dataset_name={tmp_path / 'rows.jsonl'}", f"data.val_dataset_name={tmp_path / 'val.jsonl'}")
    # Every group has a signal, so that a step is 8 groups
    always = ("zero_variance=train", "~max_refill_ratio", f"max_steps={STEPS}", REWARDS)
    process = TrainProcess(tmp_path / "run", *files, *always, config=CONFIGS / "rlvr.yaml", small=SHORT)
    yield process
    process.close()


def test_killed_learner_and_reward_replica_lose_no_group(train: TrainProcess, tmp_path: Path):
    """Each validation row is answered once; each reward is a column; every group is trained once."""
    train.wait_for_step(2)
    train.kill("offbeat.trainer.cli")
    train.wait_for_step(4)
    train.kill("ray::ServeReplica:reward-rlvr-boxed")
    assert train.wait() == 0, train.output
    report = train.report()
    assert (report["pipeline"], report["steps"], report["groups_trained"]) == ("rlvr", STEPS, STEPS * 8)
    assert report["groups_failed"] == {}, "a reward that is away is asked again"
    found, _ = examine(train.output_dir)
    assert found.proven, found.findings
    assert found.lineage.learners == 2
    assert left_behind(train) == []
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
