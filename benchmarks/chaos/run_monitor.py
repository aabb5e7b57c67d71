"""The run under chaos as it looks from outside: its command, its Redis, its processes, what it leaves.

Invariants: whatever happens, `close` leaves no process of the run behind; a run whose watcher was killed ends in order.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import psutil
from redis import Redis
from redis.exceptions import RedisError

from offbeat.deploy import run_folder
from offbeat.deploy.components.learner_host import learner_key
from offbeat.deploy.local.processes import SHARED_MEMORY, find_orphaned_shared_memory
from offbeat.services.keys import RunKeys
from offbeat.services.process import bind_to_thread

STOP_S = 30.0
FOLDER_S = 60.0


class RunUnderChaos:
    """One `offbeat train` of its own."""

    def __init__(
        self, config: Path, output_dir: Path, run_id: str, overrides: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """environment: of the command, beside ours."""
        self.output_dir = output_dir
        self._keys = RunKeys(run_id)
        self._run_id = run_id
        self.log = output_dir.with_name(f"{output_dir.name}.log")
        self._shm_before = {path.name for path in SHARED_MEMORY.iterdir()}
        self.seen: dict[int, float] = {}
        """Every process of the run that was ever seen: pid -> its start."""
        self.complaints: list[str] = []
        """What must not be and was seen: a version that went back."""
        self._highest = -1
        command = [sys.executable, "-m", "offbeat.deploy.cli.app", "train", str(config), f"output_dir={output_dir}"]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                bind_to_thread([*command, f"exp_name={run_id}", *overrides], by=signal.SIGTERM),
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        self.root = psutil.Process(self.process.pid)
        self._redis: Redis | None = None

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def has_folder(self) -> bool:
        """Whether the run's folder is its own by now: an earlier run that lay there has been moved aside."""
        path = self.output_dir / run_folder.CONFIG
        return path.exists() and path.stat().st_mtime >= self.root.create_time()

    def look(self) -> None:
        """Remember which processes there are; orphans of the run are ours."""
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                self.seen.setdefault(process.pid, process.create_time())

    def redis(self) -> Redis | None:
        """Return a client that gives up at once, or None before there is a Redis."""
        if self._redis is None:
            endpoints = run_folder.read_endpoints(self.output_dir)
            if endpoints is not None:
                self._redis = Redis.from_url(endpoints.redis_url, socket_timeout=1.0, socket_connect_timeout=1.0)
        return self._redis

    def _field(self, key: str, name: str) -> str | None:
        """Of a hash; empty where it is not there, None while Redis does not tell."""
        redis = self.redis()
        try:
            raw = None if redis is None else cast(bytes | None, redis.hget(key, name))
        except RedisError:
            return None
        return "" if raw is None else raw.decode()

    def step(self) -> int | None:
        """Optimizer batches behind the newest published weights, -1 before the first; None while Redis does not tell."""
        raw = self._field(self._keys.progress, "step")
        if raw is None:
            return None
        step = int(raw or -1)
        if step < self._highest:
            self.complaints.append(f"the published weights went back from step {self._highest} to {step}")
        self._highest = step
        return step

    def stage(self) -> str:
        """What the learner is at."""
        raw = self._field(self._keys.record, "learner_doing")
        return str(cast(dict[str, Any], json.loads(raw)).get("stage", "")) if raw else ""

    def trouble(self) -> str | None:
        """What goes wrong while the learner trains on, or nothing; None while Redis does not tell."""
        return self._field(self._keys.record, "learner_trouble")

    def leader(self) -> int | None:
        """Process of the learner that trains."""
        raw = self._field(learner_key(self._run_id), "pid")
        return int(raw) if raw else None

    def trim(self, metrics: int, events: int) -> None:
        """Keep the newest of each in Redis alone, as it does by itself at numbers that take hours to reach."""
        redis = self.redis()
        if redis is None:
            return
        with suppress(RedisError):
            redis.xtrim(self._keys.metrics, maxlen=metrics, approximate=False)
            redis.xtrim(self._keys.key("buffer", "life"), maxlen=events, approximate=False)

    def limit_memory(self, num_bytes: int) -> bool:
        """Let Redis refuse writes beyond so many bytes, 0: beyond none; False if it did not hear of it."""
        redis = self.redis()
        if redis is None:
            return False
        try:
            return bool(redis.config_set("maxmemory", num_bytes))
        except RedisError:
            return False

    def wait(self, timeout_s: float) -> int | None:
        """Exit code, or None if it has not ended in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def leftovers(self) -> list[str]:
        """What the run left outside its folder, second nodes included: close them before."""
        left = [f"process {pid}: {_line(pid)}" for pid, started in self.seen.items() if _lives(pid, started)]
        files = {
            path for path in SHARED_MEMORY.iterdir() if f"-{self._run_id}-" in path.name
        } | find_orphaned_shared_memory()
        return left + [str(path) for path in sorted(files) if path.name not in self._shm_before]

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


def _line(pid: int) -> str:
    """What a process is, by its command line."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(psutil.Process(pid).cmdline())[:200]
    return "it has ended since"
