"""`offbeat train` as a child process, for tests that look at a whole run from outside."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from offbeat.deploy.audit.lives import Audit
from offbeat.deploy.cli.audit import examine
from offbeat.services.weights.transports.base import owner_of
from tests.paths import QUICKSTART

SHORT = (
    "warm_start.steps=60",
    "max_steps=12",
    "save_steps=3",
    "eval_steps=0",
    "buffer.worker_timeout_s=4",
    "buffer.learner_timeout_s=3",
)
SMALL = (*SHORT, "final_val_batch_size=16")
"""A run that takes about a minute, most of it to start."""
HF_INFER = "actor_infer.strategy_args={strategy_name: hf_infer, strategy_config: null}"
"""The engine that starts soonest, where it does not matter which one samples."""
HTTP = httpx.Client(timeout=10.0, trust_env=False)
"""Shared by all requests, as each new client loads the CA certificates, which takes 70 ms of CPU."""


class TrainProcess:
    """One `offbeat train` and what it started."""

    def __init__(
        self, output_dir: Path, *overrides: str, config: Path = QUICKSTART, small: tuple[str, ...] = SMALL
    ) -> None:
        self.output_dir = output_dir
        self._run = config.stem
        self._log = output_dir.with_suffix(".log")
        command = [
            sys.executable,
            "-m",
            "offbeat.deploy.cli.app",
            "train",
            str(config),
            f"output_dir={output_dir}",
            *small,
        ]
        self.process = subprocess.Popen(
            [*command, *overrides], stdout=self._log.open("w"), stderr=subprocess.STDOUT, start_new_session=True
        )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def view(self) -> dict[str, Any] | None:
        """The run as the control service shows it, or None while that does not answer."""
        try:
            endpoints = json.loads((self.output_dir / "endpoints.json").read_text())
            answer = HTTP.get(f"{endpoints['control_url']}/runs/{self._run}")
        except (OSError, ValueError, httpx.HTTPError):
            return None
        return answer.json() if answer.status_code == httpx.codes.OK else None

    def wait_for_step(self, step: int, timeout_s: float = 240.0) -> dict[str, Any]:
        """Return the view once `step` batches are published."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.output
            view = self.view()
            if view and view["step"] >= step:
                return view
            time.sleep(0.1)
        raise TimeoutError(f"step {step} not reached within {timeout_s} s\n{self.output}")

    def find(self, *marks: str) -> psutil.Process | None:
        """The newest process of the run whose command line holds all of `marks`."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                line = " ".join(process.cmdline())
                if all(mark in line for mark in marks) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append((process.create_time(), process))
            except psutil.NoSuchProcess:
                continue
        return max(found, key=lambda row: row[0])[1] if found else None

    def kill(self, *marks: str, timeout_s: float = 60.0) -> int:
        """kill -9 the newest process whose command line holds `marks`, and see it gone; returns its pid."""
        deadline = time.monotonic() + timeout_s
        while (process := self.find(*marks)) is None:
            assert time.monotonic() < deadline, f"no process {marks}\n{self.output}"
            time.sleep(0.1)
        process.kill()
        psutil.wait_procs([process], timeout=10)
        return process.pid

    def wait(self, timeout_s: float = 300.0) -> int:
        """Exit code."""
        return self.process.wait(timeout_s)

    def report(self) -> dict[str, Any]:
        return json.loads((self.output_dir / "report.json").read_text())

    def close(self) -> None:
        """End it, whatever state it is in."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(10)


Start = Callable[..., TrainProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `offbeat train` with overrides, as often as it is called; end what is left."""
    started: list[TrainProcess] = []

    def run(*overrides: str) -> TrainProcess:
        started.append(TrainProcess(tmp_path / "run", *overrides))
        return started[-1]

    yield run
    for process in started:
        process.close()


def left_behind(train: TrainProcess) -> list[str]:
    """Files of the run in shared memory."""
    return [path.name for path in Path("/dev/shm").glob(f"offbeat-{owner_of('quickstart', train.output_dir)}-*")]


def accounted(report: dict[str, Any]) -> bool:
    lost = sum(report["groups_dropped"].values()) + sum(report["groups_failed"].values())
    return report["groups_admitted"] == report["groups_trained"] + lost


def finished(train: TrainProcess, steps: int) -> tuple[dict[str, Any], Audit]:
    """Report and audit of a run that has to train all its steps of 8 groups."""
    assert train.wait() == 0, train.output
    report = train.report()
    assert (report["steps"], report["groups_trained"]) == (steps, steps * 8)
    assert accounted(report)
    assert left_behind(train) == []
    found, _ = examine(train.output_dir)
    assert found.proven, found.findings
    return report, found
