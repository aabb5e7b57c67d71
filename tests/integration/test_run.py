"""Whole runs of `offbeat train` on a user's own env, in a folder of the user's own."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from offbeat.services.weights.transports.base import owner_of
from tests.integration.mesh import HTTP
from tests.integration.steering import (
    OFFBEAT,
    STILL_S,
    WATCHED,
    Steering,
    steer,
)
from tests.waiting import wait_until_sync

pytestmark = pytest.mark.alone

STOPPED, FAILED = 130, 1
RUN_ID = "own"
GROUPS_PER_STEP, MAX_STALENESS = 4, 1
MY_ENVS = '''
import pathlib
import sys
import time
import gymnasium

with pathlib.Path(__file__).with_name("importers.txt").open("a") as importers:
    print(*sys.orig_argv, file=importers)

COLORS = ("red", "green", "blue")


class Echo(gymnasium.Env):
    """Say the word that is shown."""

    system_prompt = "say it"
    words = ("say", "it", *COLORS)

    def __init__(self, wait_s: float = 0.0):
        self.wait_s = wait_s

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = COLORS[int(self.np_random.integers(len(COLORS)))]
        return self.word, {}

    def step(self, action):
        time.sleep(self.wait_s)
        hit = action.strip() == self.word
        return "it", float(hit), True, False, {"success": hit}


def no_demos(env, rng):
    raise ValueError("these demonstrations are missing")
'''
MY_RUN = """
exp_name: own
output_dir: runs/own
custom_envs:
  Echo: {env_type: "my_envs:Echo", max_steps: 1, max_tokens_per_step: 2, env_config: {wait_s: 0.4}}
train_env_manager: {num_env_groups: 8, group_size: 4}
rollout_batch_size: 16
max_steps: 24
save_steps: 5
eval_steps: 0
final_val_batch_size: 8
sequence_length: 64
buffer: {worker_timeout_s: 5, learner_timeout_s: 4}
actor_infer: {generating_args: {max_new_tokens: 2}, strategy_args: {strategy_name: hf_infer}}
actor_train: {training_args: {learning_rate: 1e-3}}
"""


class Command:
    """`offbeat train own.yaml` in a folder that holds the user's env."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self.run_dir = folder / "runs" / "own"
        self.log = folder / "output.txt"
        self.environment = {**os.environ, "OFFBEAT_TEST": str(folder)}
        with self.log.open("a") as out:
            self.process = subprocess.Popen(
                [OFFBEAT, "train", "own.yaml", *overrides],
                cwd=folder,
                stdout=out,
                stderr=out,
                env=self.environment,
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        """Of the control service. Raises OSError or ValueError while there is none."""
        return str(json.loads((self.run_dir / "endpoints.json").read_text())["control_url"])

    def call(self, method: str, path: str, body: dict[str, float] | None = None) -> Any:
        """What the control service answers, or None while it does not."""
        try:
            return HTTP.request(method, f"{self.url}{path}", json=body).raise_for_status().json()
        except (OSError, ValueError, httpx.HTTPError):
            return None

    def wait_for_step(self, step: int) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            view = self.call("GET", f"/runs/{RUN_ID}")
            return bool(view) and view["step"] >= step

        wait_until_sync(reached, timeout_s=240, every_s=0.1)

    def living(self, mark: str = "") -> list[psutil.Process]:
        """Every process that this command or its descendants started, by a mark in their environment (redis-server writes
        over its own) or by where it runs; of those, who has `mark` in the command line."""
        redis = self.run_dir / "redis"
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("OFFBEAT_TEST") == str(self.folder) or process.cwd() == str(redis)
                if ours and process.status() != psutil.STATUS_ZOMBIE and mark in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def kill(self, mark: str) -> None:
        """kill -9 the one process whose command line holds `mark`."""
        wait_until_sync(lambda: len(self.living(mark)) == 1, timeout_s=60)
        self.living(mark)[0].kill()

    def end(self) -> None:
        for process in self.living():
            process.kill()
        self.process.wait(10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_envs.py").write_text(MY_ENVS)
    (tmp_path / "own.yaml").write_text(MY_RUN)
    return tmp_path


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    begun: list[Command] = []
    yield begun
    for command in begun:
        command.end()


def shared_memory(command: Command) -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"offbeat-{owner_of(RUN_ID, command.run_dir)}-*")]


@pytest.mark.timeout(480)
def test_a_rest_run_survives_kills_of_redis_and_control_service(folder: Path, commands: list[Command]):
    """Its settings are changed and it is stopped over REST."""
    first = Command(folder, "max_steps=2000", "save_steps=1000")
    commands.append(first)
    first.wait_for_step(2)
    password = urlsplit(json.loads((first.run_dir / "endpoints.json").read_text())["redis_url"]).password
    assert password
    assert first.living(password) == [], "a command line is for everyone to read"
    run = Steering(RUN_ID, first.url, first.call)
    with run.watched(folder):
        changed_at = steer(run)
        wait_until_sync(lambda: len(first.living("EnvWorkerActor")) == 2, timeout_s=120)
        run.patch(num_workers=1)
        wait_until_sync(lambda: len(first.living("EnvWorkerActor")) == 1, timeout_s=60)
        reached = run.view()["step"]
        assert first.call("POST", f"/runs/{RUN_ID}/stop")["wanted"] == "stopped"
        assert first.process.wait(60) == STOPPED, first.log.read_text()
    watched = (folder / WATCHED).read_text()
    assert f"from step {changed_at + 1} on: learning_rate 0.0005" in watched
    assert "the run is paused" in watched
    assert "Traceback" not in watched
    (saved,) = (first.run_dir / "checkpoints").glob("step-*")
    stopped_at = int(saved.name.removeprefix("step-"))
    assert stopped_at >= reached
    said = first.log.read_text()
    assert f"Stopped at step {stopped_at} of 2000; checkpoint: runs/own/checkpoints/{saved.name}" in said
    assert "Resume with: offbeat train own.yaml max_steps=2000 save_steps=1000 resume_from_checkpoint=true" in said
    assert json.loads((first.run_dir / "report.json").read_text())["steps"] >= reached
    assert first.living() == []
    assert shared_memory(first) == []

    last = stopped_at + 15
    second = Command(folder, "resume_from_checkpoint=true", f"max_steps={last}")
    commands.append(second)
    second.wait_for_step(stopped_at + 2)
    second.kill("redis-server")
    second.wait_for_step(stopped_at + 5)
    settings = second.call("GET", f"/runs/{RUN_ID}")["settings"]
    assert (settings["learning_rate"], settings["temperature"], settings["max_staleness"]) == (5e-4, 0.8, 2.0)
    second.kill("ServeReplica:control")
    assert second.process.wait(240) == 0, second.log.read_text()
    assert second.living() == []
    assert shared_memory(second) == []

    report = json.loads((second.run_dir / "report.json").read_text())
    assert (report["steps"], report["attempts"], report["eval_episodes"]) == (last, 2, 8)
    gone = sum(report["groups_dropped"].values()) + sum(report["groups_failed"].values())
    assert report["groups_trained"] == GROUPS_PER_STEP * last
    assert report["groups_admitted"] == GROUPS_PER_STEP * last + gone + report["groups_in_flight"]
    assert report["max_staleness_seen"] <= 2
    assert (second.run_dir / "episodes.html").exists()


def test_a_learner_that_fails_for_good_fails_the_run_in_words(folder: Path, commands: list[Command]):
    """Its env was checked by the command, and by no process of the control service."""
    command = Command(folder, "++warm_start={demos: 'my_envs:no_demos', tag: Echo}")
    commands.append(command)
    assert command.process.wait(240) == FAILED
    said = command.log.read_text()
    assert "The run failed: learner" in said
    assert "Resume with" not in said
    assert "Traceback" not in said
    assert "runs/own/logs/learner.out" in said
    assert "these demonstrations are missing" in (command.run_dir / "logs/learner.out").read_text()
    assert json.loads((command.run_dir / "report.json").read_text())["steps"] == 0
    importers = (folder / "importers.txt").read_text()
    assert "offbeat train own.yaml" in importers
    assert "validation_main" not in importers
    workers = [path.name for path in (command.run_dir / "logs/ray").glob("worker-*.out")]
    assert workers
    assert [name for name in workers if "-ffffffff-" in name] == [], "started for no job"
    assert command.living() == []


def test_a_learner_attaches_detaches_and_leaves_no_process(folder: Path, commands: list[Command]):
    """No process outlives a killed command."""
    first = Command(folder, "control.learner=external", "max_steps=2000", "save_steps=1000")
    commands.append(first)
    wait_until_sync(lambda: first.call("GET", f"/runs/{RUN_ID}") is not None, timeout_s=120)
    with attached(first, "1") as learner:
        first.wait_for_step(2)
        learner.send_signal(signal.SIGINT)
        assert learner.wait(60) == 0, said(first, "1")
    run = Steering(RUN_ID, first.url, first.call)
    step = run.view()["step"]
    assert f"Detached at step {step} of 2000; " in said(first, "1")
    # What the staleness bound allows is played, and no further; then all wait for the next learner.
    wait_until_sync(lambda: full(run, step), timeout_s=60, every_s=0.2)
    time.sleep(STILL_S)
    assert full(run, step)
    assert "waits for `offbeat learner attach own`" in run.offbeat("why")
    with attached(first, "2"):
        first.wait_for_step(step + 2)
        assert f"Resuming from step {step}: " in said(first, "2")
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait(5)
    wait_until_sync(lambda: first.living() == [], timeout_s=15)
    assert shared_memory(first) != []

    second = Command(folder)
    commands.append(second)
    wait_until_sync(lambda: second.call("GET", f"/runs/{RUN_ID}") is not None, timeout_s=120)
    assert (folder / "runs" / "own.1" / "config.yaml").exists()
    os.killpg(second.process.pid, signal.SIGINT)
    began = time.monotonic()
    assert second.process.wait(30) == STOPPED
    assert time.monotonic() - began < 10
    assert second.living() == []
    assert shared_memory(second) == []


@contextmanager
def attached(command: Command, name: str) -> "Iterator[subprocess.Popen[bytes]]":
    """`offbeat learner attach own` in another terminal."""
    with (command.folder / f"learner-{name}.txt").open("w") as out:
        learner = subprocess.Popen(
            [OFFBEAT, "learner", "attach", RUN_ID], cwd=command.folder, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield learner
    finally:
        learner.kill()
        learner.wait(10)


def said(command: Command, name: str) -> str:
    """Everything that an attached learner has said so far."""
    return (command.folder / f"learner-{name}.txt").read_text()


def full(run: Steering, step: int) -> bool:
    """Whether every group is there that may be played before step `step` + 1."""
    counters = run.view()["counters"]
    gone = sum(counters["dropped"].values()) + sum(counters["failed"].values())
    return counters["admitted"] - gone == (step + MAX_STALENESS + 1) * GROUPS_PER_STEP
