"""`offbeat learner attach`: detached and attached again, standing by, several processes of which one dies, and mistakes."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.buffer.admin import BufferWatch
from offbeat.services.keys import RunKeys
from offbeat.services.weights.replica_reports import ReplicaReport, encode_report
from tests.forked import ForkedProcess
from tests.integration.learner_run import (
    ENVIRONMENT,
    ROOT,
    Run,
    a_run,
)
from tests.waiting import wait_until_sync

SMOOTH = ("control.learner=external", "actor_train.training_args.adam_epsilon=0.01")
"""Adam with its usual epsilon makes full steps of gradients that are mere rounding, such as those of key biases."""


pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def alone(redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that one learner of one process trains from start to end."""
    with a_run(redis_server, tmp_path_factory.mktemp("alone"), "alone", SMOOTH) as run:
        learner = run.attach()
        assert learner.wait(timeout=240) == 0, run.said(learner)
        yield run


def assert_same_weights(one: Run, other: Run, atol: float = 0.0) -> None:
    for name, tensor in one.weights(6).items():
        torch.testing.assert_close(tensor, other.weights(6)[name], rtol=0, atol=atol, msg=name)


def gradient_norms(run: Run) -> dict[int, float]:
    """By step; the last record of a step that was repeated."""
    steps = [r for r in run.records() if r.source == "learner" and r.step is not None]
    return {r.step: r.values["actor/grad_norm"].value for r in steps if r.step is not None}


def follower_of(learner: ForkedProcess) -> psutil.Process:
    """Rank 1."""

    found: list[psutil.Process] = []

    def is_follower(process: psutil.Process) -> bool:
        try:
            return "offbeat.trainer.cli" in process.cmdline()
        except psutil.Error:  # it has ended, as one that a library has started
            return False

    def is_found() -> bool:
        found[:] = filter(is_follower, psutil.Process(learner.pid).children())
        return len(found) == 1

    wait_until_sync(is_found, timeout_s=240)
    return found[0]


async def set_paused(run: Run, paused: bool) -> None:
    """Let no group begin, or let them begin again."""
    async with AsyncRedis.from_url(run.url) as redis:
        await BufferWatch(redis, run.config.exp_name).set_paused(paused)


def test_an_attached_learner_shows_its_progress_line_by_line(alone: Run) -> None:
    said = alone.said(alone.learners[0])
    assert "Learner of alone: 1 process(es)" in said
    assert "warming up" in said
    assert "step 6/6  reward " in said
    assert said.rstrip().endswith("checkpoints/step-000006")
    assert "Trained all 6 steps" in said


def test_a_detached_run_collects_up_to_the_bound_and_continues_where_it_was(
    redis_server: str, tmp_path: Path, alone: Run
) -> None:
    with a_run(redis_server, tmp_path, "detached", (*SMOOTH, "save_steps=100")) as run:
        first = run.attach()
        wait_until_sync(lambda: run.published() >= 2, timeout_s=240)
        first.send_signal(signal.SIGINT)
        assert first.wait(timeout=120) == 0
        said = run.said(first)
        assert "Finishing the running step" in said
        assert "\nResume with: offbeat learner attach detached\n" in said
        assert not run.redis.exists(run.keys.lease)
        newest = max((run.config.output_dir / "checkpoints").glob("step-*"))
        step = json.loads((newest / "learner.json").read_text())["step"]
        assert f"Detached at step {step} of 6; the lease is free; checkpoint: {newest}" in said
        bound = min(12, (step + 2) * 2)  # max_staleness 1, 2 groups a step
        wait_until_sync(lambda: run.counters().admitted == bound)
        assert run.counters().trained == 2 * step
        second = run.attach()
        assert second.wait(timeout=240) == 0, run.said(second)
        assert f"Resuming from step {step}" in run.said(second)
        assert run.counters().trained == 12
        assert_same_weights(alone, run)


def test_a_learner_that_stands_by_takes_over_from_a_dead_one(redis_server: str, tmp_path: Path, alone: Run) -> None:
    with a_run(redis_server, tmp_path, "standby", SMOOTH) as run:
        asyncio.run(set_paused(run, True))  # or the first may have finished before the second looks
        first = run.attach("--nproc", "2")
        follower = follower_of(first)
        wait_until_sync(lambda: run.published() >= 0, timeout_s=240)
        second = run.attach()
        wait_until_sync(lambda: f":{first.pid}, since " in run.said(second), timeout_s=240)
        first.kill()
        first.wait()
        psutil.wait_procs([follower], timeout=30)
        assert not follower.is_running()
        wait_until_sync(lambda: "The lease is free: this learner has taken over." in run.said(second))
        asyncio.run(set_paused(run, False))
        assert second.wait(timeout=240) == 0, run.said(second)
        assert run.counters().trained == 12
        assert_same_weights(alone, run, atol=1e-5)


def test_a_hanging_rank_ends_the_learner_and_two_ranks_match_one(redis_server: str, tmp_path: Path, alone: Run) -> None:
    with a_run(redis_server, tmp_path, "pair", SMOOTH) as run:
        first = run.attach("--nproc", "2")
        follower = follower_of(first)
        wait_until_sync(lambda: run.published() >= 1, timeout_s=240)
        follower.suspend()
        assert first.wait(timeout=120) == 1
        log = (run.config.output_dir / "logs" / "learner.log").read_text()
        assert f"rank 1 (pid {follower.pid}) sent no heartbeat for" in log
        assert f"rank 1 (pid {follower.pid}) was killed by SIGKILL" in run.said(first)
        assert not follower.is_running()
        assert not run.redis.exists(run.keys.lease)
        second = run.attach("--nproc", "2")
        assert second.wait(timeout=240) == 0, run.said(second)
        assert_same_weights(alone, run, atol=1e-5)
        assert gradient_norms(run) == pytest.approx(gradient_norms(alone), rel=1e-4)


@pytest.mark.nightly
def test_processes_on_two_hosts_match_one_and_die_together(redis_server: str, tmp_path: Path, alone: Run) -> None:
    hosts = ("actor_train.num_processes=2", "num_gpus_per_node=1")
    with a_run(redis_server, tmp_path, "hosts", (*SMOOTH, *hosts)) as run:
        other = run.attach("--node", "1")
        first = run.attach()
        follower = follower_of(other)
        wait_until_sync(lambda: run.published() >= 1, timeout_s=240)
        follower.kill()
        assert first.wait(timeout=120) == 1
        assert f"rank 1 (pid {follower.pid}) was killed by SIGKILL" in run.said(first)
        second = run.attach()
        assert second.wait(timeout=240) == 0, run.said(second)
        assert "Learner of hosts: 2 process(es) on" in run.said(second)
        assert run.counters().trained == 12
        run.redis.hset(run.keys.record, "state", "finished")
        assert other.wait(timeout=120) == 0, run.said(other)
        assert_same_weights(alone, run, atol=1e-5)
        unknown = attach("hosts", "--redis", run.url, "--node", "2")
        assert "the learner of hosts has 2 node(s), numbered from 0" in unknown.stderr


def attach(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offbeat.deploy.cli.app", "learner", "attach", *arguments]
    return subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)


def test_mistakes_are_reported_in_one_line_with_an_exit_code_of_their_own(alone: Run) -> None:
    mistakes = {
        ("nobody", "--redis", alone.url): (2, "there is no run 'nobody' in this Redis"),
        ("alone", "--redis", "http://127.0.0.1"): (2, "--redis: expected redis://HOST:PORT"),
        ("alone", "--redis", "redis://:secret@127.0.0.1:1/0"): (1, "no Redis answers at redis://127.0.0.1:1/0"),
        ("nobody",): (2, "no run in nobody or runs/nobody is active on this host: pass its Redis as --redis, a URL or"),
    }
    for arguments, (code, message) in mistakes.items():
        ended = attach(*arguments)
        assert (ended.returncode, message in ended.stderr) == (code, True), ended.stderr
        assert "Traceback" not in ended.stderr
        assert "secret" not in ended.stderr


def test_a_run_that_is_over_is_not_trained(alone: Run) -> None:
    alone.redis.hset(alone.keys.record, "state", "finished")
    ended = attach("alone", "--redis", alone.url)
    alone.redis.hdel(alone.keys.record, "state")
    assert ended.returncode == 4
    assert "run alone is finished: all steps are trained" in ended.stderr


def test_shared_memory_is_refused_across_hosts(redis_server: str, tmp_path: Path) -> None:
    with a_run(redis_server, tmp_path, "far", ("weights.transport=shm",)) as run:
        # a replica reports each second: its newest report must not age while the command starts
        report = ReplicaReport(-1, time.time() + 600, host="gpu-7", memory="another-boot:26")
        run.redis.hset(RunKeys("far").served, "replica", encode_report(report))
        ended = attach("far", "--redis", run.url)
    assert ended.returncode == 2
    assert "replica replica samples on gpu-7, this learner runs on" in ended.stderr
    assert "weights.transport=fs" in ended.stderr


def test_a_host_without_the_model_says_so(redis_server: str, tmp_path: Path) -> None:
    with a_run(redis_server, tmp_path, "bare") as run, Redis.from_url(run.url) as redis:
        config = run.config.model_copy(update={"pretrain": "/nowhere/model"})
        redis.hset(run.keys.record, "config", config.model_dump_json())
        ended = attach("bare", "--redis", run.url)
    assert ended.returncode == 2
    assert "trains /nowhere/model, but " in ended.stderr
