"""The run under chaos as it looks from outside: its command, its Redis, its processes, what it leaves.

Invariant: whatever happens, `close` leaves no process of the run behind.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import psutil
from redis import Redis
from redis.exceptions import RedisError

from deploy.run_folder import read_endpoints
from services.keys import RunKeys

STOP_S = 30.0
SHM = Path("/dev/shm")


class RunUnderChaos:
    """One `offbeat train` of its own."""

    def __init__(self, config: Path, output_dir: Path, run_id: str, overrides: Sequence[str]) -> None:
        self.output_dir = output_dir
        self._keys = RunKeys(run_id)
        self._run_id = run_id
        self.log = output_dir.with_name(f"{output_dir.name}.log")
        self._shm_before = {path.name for path in SHM.iterdir()}
        self.seen: dict[int, float] = {}
        """Every process of the run that was ever seen: pid -> its start."""
        command = [sys.executable, "-m", "deploy.cli", "train", str(config), f"output_dir={output_dir}"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, f"exp_name={run_id}", *overrides], stdout=log, stderr=log, start_new_session=True
            )
        self.root = psutil.Process(self.process.pid)
        self._redis: Redis | None = None

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def look(self) -> None:
        """Remember which processes there are."""
        with suppress(psutil.NoSuchProcess):
            for process in self.root.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    self.seen.setdefault(process.pid, process.create_time())

    def redis(self) -> Redis | None:
        """A client that gives up at once, or None before there is a Redis."""
        if self._redis is None:
            endpoints = read_endpoints(self.output_dir)
            if endpoints is not None:
                self._redis = Redis.from_url(endpoints.redis_url, socket_timeout=1.0, socket_connect_timeout=1.0)
        return self._redis

    def step(self) -> int | None:
        """Optimizer batches behind the newest published weights; None while Redis does not tell."""
        redis = self.redis()
        try:
            raw = None if redis is None else cast(bytes | None, redis.hget(self._keys.progress, "step"))
        except RedisError:
            return None
        return -1 if raw is None else int(raw)

    def stage(self) -> str:
        """What the learner is at."""
        redis = self.redis()
        try:
            raw = None if redis is None else cast(bytes | None, redis.hget(self._keys.record, "learner_doing"))
        except RedisError:
            return ""
        return str(cast(dict[str, Any], json.loads(raw)).get("stage", "")) if raw else ""

    def cut_connections(self) -> int:
        """Close every connection to Redis but our own; returns how many."""
        redis = self.redis()
        return 0 if redis is None else int(cast(Any, redis.execute_command("CLIENT", "KILL", "TYPE", "normal")))

    def wait(self, timeout_s: float) -> int | None:
        """Exit code, or None if it has not ended in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def leftovers(self) -> list[str]:
        """What the run left outside its folder."""
        left = [f"process {pid}" for pid, started in self.seen.items() if _lives(pid, started)]
        files = [path.name for path in SHM.iterdir() if path.name not in self._shm_before]
        return left + [f"/dev/shm/{name}" for name in files if f"-{self._run_id}-" in name or _held_by_nobody(name)]

    def close(self) -> None:
        """End it, whatever state it is in."""
        if self.running:
            self.process.send_signal(signal.SIGINT)
            if self.wait(STOP_S) is None:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        if self._redis is not None:
            self._redis.close()
        deadline = time.monotonic() + 5.0
        while any(_lives(pid, started) for pid, started in self.seen.items()) and time.monotonic() < deadline:
            time.sleep(0.1)


def _lives(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        return process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _held_by_nobody(name: str) -> bool:
    """Whether a file of Python's multiprocessing is open in no process: others' runs go on beside ours."""
    if not name.startswith(("psm_", "sem.mp-")):
        return False
    for process in psutil.process_iter():
        with suppress(OSError):
            if name in Path(f"/proc/{process.pid}/maps").read_text():
                return False
    return True
