"""Whole runs whose processes are killed: each ends, and every admitted group is trained once, dropped or failed by name."""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from redis import Redis

from offbeat.benchmarks.chaos.failover import fail_over
from offbeat.benchmarks.chaos.proxy import write_server_script
from offbeat.deploy.cli.audit import examine
from offbeat.services.keys import RunKeys
from offbeat.services.redis.server import server_binary
from tests.integration.mesh import HF_INFER, Start, TrainProcess, accounted, finished, left_behind, start
from tests.integration.steering import OFFBEAT
from tests.waiting import wait_until_sync

__all__ = ["start"]
pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]


def wait_until_asleep(train: TrainProcess) -> None:
    """Return in the learner's turn, when the engine sleeps."""
    keys = RunKeys("quickstart")
    with Redis.from_url(json.loads((train.output_dir / "endpoints.json").read_text())["redis_url"]) as redis:

        def sleeps() -> bool:
            turn, states = redis.hget(keys.turn, "id"), redis.hvals(keys.sharing_engines)
            return turn is not None and any(state.endswith(turn) for state in states)

        wait_until_sync(sleeps, every_s=0.002)


@pytest.mark.nightly
def test_a_killed_scorer_returns_and_no_group_is_trained_without_its_score(start: Start):
    """In a run whose engine sleeps during steps: the learner and the engine are killed while it does."""
    train = start(
        *("max_steps=8", "use_kl_loss=true", "kl_loss_coef=0.05", "reference.strategy_args.placement=service"),
        *("max_staleness=0", "actor_infer.strategy_args.strategy_config.enable_sleep_mode=true"),
    )
    train.wait_for_step(2)
    train.kill("ray::ScorerActor")
    train.wait_for_step(4)
    wait_until_asleep(train)
    train.kill("offbeat.trainer.cli")
    train.wait_for_step(5)
    wait_until_asleep(train)
    train.kill("ray::ServeReplica:generation")
    report, _ = finished(train, steps=8)
    assert report["max_staleness_seen"] == 0
    records = [json.loads(line) for line in (train.output_dir / "metrics.jsonl").read_text().splitlines()]
    assert any("reference/tokens_per_busy_s" in json.dumps(record) for record in records)
    assert (train.output_dir / "logs" / "scorer-quickstart:reference-0.log").read_text().count("scores groups") == 2


@pytest.mark.nightly
def test_a_failover_to_a_lagging_replica_has_no_group_trained_twice(start: Start, tmp_path: Path):
    """The replica lacks the acknowledgements of at least one checkpoint, and all groups admitted since."""
    orders = tmp_path / "orders"
    orders.mkdir()
    server_script = write_server_script(orders / "server", server_binary(None), orders)
    train = start(f"redis.server={server_script}", "max_staleness=8", "buffer.order=completion", HF_INFER)
    train.wait_for_step(2)
    server = train.find("redis-server")
    assert server is not None
    fail_over(
        json.loads((train.output_dir / "endpoints.json").read_text())["redis_url"],
        server,
        orders,
        lag=lambda: train.wait_for_step(train.wait_for_step(0)["step"] + 4),
        promoted=lambda: None,
        wait=waits,
    )
    _, found = finished(train, steps=12)
    assert found.lineage.learners == 1, "the learner that lives reconciles the data"
    events = [json.loads(line) for line in (train.output_dir / "ledger" / "groups.jsonl").read_text().splitlines()]
    assert any(event["event"] == "reconciled" for event in events), events[-5:]


def waits(done: Callable[[], bool], timeout_s: float) -> bool:
    wait_until_sync(done, timeout_s)
    return True


def test_ctrl_c_stops_cleanly_in_ten_seconds_and_a_copy_of_the_folder_is_resumed(start: Start, tmp_path: Path):
    """It learns nothing, so learner and engine must agree to float noise through all updates, also after the resume.

    The original folder is deleted: a run is what its folder holds, wherever that is.
    """
    nothing = "actor_train.training_args.learning_rate=0"
    train = start(nothing)
    step = train.wait_for_step(4)["step"]
    family = psutil.Process(train.process.pid).children(recursive=True)
    train.process.send_signal(signal.SIGINT)
    asked = time.monotonic()
    assert train.wait(timeout_s=30) == 130
    assert time.monotonic() - asked < 10
    assert "resume_from_checkpoint=true" in train.output
    assert train.report()["steps"] >= step
    assert psutil.wait_procs(family, timeout=1)[1] == []
    assert left_behind(train) == []

    copy = tmp_path / "restored" / "elsewhere"
    shutil.copytree(train.output_dir, copy, symlinks=True)
    shutil.rmtree(train.output_dir)
    command = [OFFBEAT, "train", "restored/elsewhere/config.yaml", "resume_from_checkpoint=true"]
    resumed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert not train.output_dir.exists()
    assert (copy / "checkpoints" / "step-000012" / "model.safetensors").is_file()
    report = json.loads((copy / "report.json").read_text())
    assert (report["steps"], report["attempts"], report["groups_trained"]) == (12, 2, 12 * 8)
    assert accounted(report)
    assert report["weight_updates"] >= 5
    assert report["mismatch_kl"] < 1e-9
    found, _ = examine(copy)
    assert found.proven, found.findings
