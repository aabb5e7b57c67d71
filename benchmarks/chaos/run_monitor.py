"""External view of a run under chaos; `close` leaves no process."""

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
    def __init__(
        self, config: Path, output_dir: Path, run_id: str, overrides: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.output_dir = output_dir
        self._keys = RunKeys(run_id)
        self._run_id = run_id
        self.log = output_dir.with_name(f"{output_dir.name}.log")
        self._shm_before = {path.name for path in SHARED_MEMORY.iterdir()}
        self.processes: dict[int, float] = {}
        """Pid -> start time, of all processes."""
        self.complaints: list[str] = []
        """Violations, e.g. a decreased version."""
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
        """Return whether the run owns its folder."""
        path = self.output_dir / run_folder.CONFIG
        return path.exists() and path.stat().st_mtime >= self.root.create_time()

    def record_processes(self) -> None:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                self.processes.setdefault(process.pid, process.create_time())

    def redis_url(self) -> str:
        endpoints = run_folder.read_endpoints(self.output_dir)
        return endpoints.redis_url if endpoints is not None else ""

    def redis(self) -> Redis | None:
        """Return a client without retries, if possible."""
        if self._redis is None and (url := self.redis_url()):
            self._redis = Redis.from_url(url, socket_timeout=1.0, socket_connect_timeout=1.0)
        return self._redis

    def _field(self, key: str, name: str) -> str | None:
        """Return a field; "" if absent, None while Redis is unreachable."""
        redis = self.redis()
        try:
            raw = None if redis is None else cast(bytes | None, redis.hget(key, name))
        except RedisError:
            return None
        return "" if raw is None else raw.decode()

    def step(self) -> int | None:
        """Return the newest weights' steps, -1 before the first; None while Redis is unreachable."""
        raw = self._field(self._keys.progress, "version")
        if raw is None:
            return None
        step = int(raw or -1)
        if step < self._highest:
            self.complaints.append(f"the published weights went back from step {self._highest} to {step}")
        self._highest = step
        return step

    def stage(self) -> str:
        raw = self._field(self._keys.record, "learner_doing")
        return str(cast(dict[str, Any], json.loads(raw)).get("stage", "")) if raw else ""

    def trouble(self) -> str | None:
        """Return the learner's problem or ""; None while Redis is unreachable."""
        return self._field(self._keys.record, "learner_trouble")

    def leader(self) -> int | None:
        """Return the learner's pid."""
        raw = self._field(learner_key(self._run_id), "pid")
        return int(raw) if raw else None

    def trim(self, metrics: int, events: int) -> None:
        """Trim the streams as after hours."""
        redis = self.redis()
        if redis is None:
            return
        with suppress(RedisError):
            redis.xtrim(self._keys.metrics, maxlen=metrics, approximate=False)
            redis.xtrim(self._keys.key("buffer", "life"), maxlen=events, approximate=False)

    def limit_memory(self, num_bytes: int) -> bool:
        """Limit Redis' memory (0: none); return False if unreachable."""
        redis = self.redis()
        if redis is None:
            return False
        try:
            return bool(redis.config_set("maxmemory", num_bytes))
        except RedisError:
            return False

    def expect_older_version(self) -> None:
        """Accept that the published version falls once."""
        self._highest = -1

    def empty_redis(self) -> bool:
        """Remove every key; return False if unreachable."""
        redis = self.redis()
        if redis is None:
            return False
        try:
            return bool(redis.flushall())
        except RedisError:
            return False

    def wait(self, timeout_s: float) -> int | None:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def leftovers(self) -> list[str]:
        """Return leftovers outside the folder; close second nodes first."""
        leftovers = [
            f"process {pid}: {_line(pid)}" for pid, started in self.processes.items() if _is_alive(pid, started)
        ]
        files = {
            path for path in SHARED_MEMORY.iterdir() if f"-{self._run_id}-" in path.name
        } | find_orphaned_shared_memory()
        return leftovers + [str(path) for path in sorted(files) if path.name not in self._shm_before]

    def close(self) -> None:
        """Kill the run in any state."""
        if self.running:
            self.process.send_signal(signal.SIGINT)
            if self.wait(STOP_S) is None:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        if self._redis is not None:
            self._redis.close()
        deadline = time.monotonic() + 5.0
        while any(_is_alive(pid, started) for pid, started in self.processes.items()) and time.monotonic() < deadline:
            time.sleep(0.1)


def _is_alive(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        return process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _line(pid: int) -> str:
    with suppress(psutil.NoSuchProcess):
        return " ".join(psutil.Process(pid).cmdline())[:200]
    return "it has ended since"
