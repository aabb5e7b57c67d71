"""Mesh of one command: Redis, Ray with Serve, control service, learner.

Invariants: all processes are descendants and die with this one; `stop` works in any state and leaves no process and no
shared memory.
"""

import asyncio
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import cast

import psutil
from redis import Redis
from redis.exceptions import RedisError

from offbeat.deploy.components.learner_host import LearnerHost, read_status, request_stop
from offbeat.deploy.components.ray_actors import CONTROL_APP, NAMESPACE
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.local.parent_guard import guard_command
from offbeat.deploy.local.processes import (
    adopt_orphans,
    find_shared_memory,
    remove_orphaned_shared_memory,
    terminate_descendants,
)
from offbeat.deploy.local.ray_process import (
    CONTROL,
    RETRYING,
    STATE,
    UP,
    LocalControlArgs,
    RaySettings,
)
from offbeat.deploy.report.history import command_started
from offbeat.deploy.run_folder import Endpoints, remove_endpoints, write_endpoints
from offbeat.deploy.run_setup import (
    LOGS,
    prepare_buffer,
    prepare_folder,
    run_spec,
)
from offbeat.services.buffer.admin import release_all_workers
from offbeat.services.control.client import ControlClient
from offbeat.services.control.run import DesiredState, RunState, UnknownRunError
from offbeat.services.control.store import RunStore
from offbeat.services.errors import MeshError
from offbeat.services.keys import RunKeys
from offbeat.services.process import JsonLines, free_port
from offbeat.services.redis.connection import connect, connect_async
from offbeat.services.redis.server import EmbeddedRedis
from offbeat.services.redis.url import connection_problem, redact
from offbeat.services.retry import retry_until_answered
from offbeat.services.telemetry import RedisMetrics
from offbeat.services.weights.transports.factory import cleanup
from offbeat.trainer.trackers.registry import STOP_S, has_processes

logger = logging.getLogger(__name__)

RUN_FACTORY_PATH = "offbeat.deploy.cluster.run_factory:MeshRunFactory"
OBJECT_STORE_BYTES = 128 * 2**20
"""Small: data moves through Redis and the broker."""
SPARE_CPUS = 2.0
"""For Ray's own actors."""
RAY_STARTUP_TIMEOUT_S = 600.0
RAY_SHUTDOWN_TIMEOUT_S = 3.0
TEMP_ROOT, TEMP_PREFIX = Path("/tmp"), "offbeat-"
RAY_LOG = "ray_head.out"
SLOW_START_MESSAGE = "Ray did not start within its 30 s, probably because the machine is busy; retrying."
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Task events are for Ray's dashboard, which does not run here; the GCS keeps 3 KiB for each of 100,000 calls
    "RAY_task_events_report_interval_ms": "0",
    # Ray's own metrics are unused here, and made an idle raylet grow by half a MiB a minute
    "RAY_enable_metrics_collection": "false",
    # Detects a dead HTTP proxy after 4 s instead of half a minute
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1.0",
}
LEARNER_GRACE_S = 4.0
"""Exit time beyond twice the last step's."""
EXIT_GRACE_S = 1.0
SUBMIT_TIMEOUT_S = 120.0
REDIS_CHECK_INTERVAL_S = 0.2
SHARED_MEMORY_SCAN_INTERVAL_S = 1.0
REDIS_PING_INTERVAL_S, REDIS_HANG_TIMEOUT_S = 2.0, 15.0
"""Interval, and time without an answer until a kill; a restart fits into clients' retry timeout."""


class LocalMesh:
    def __init__(
        self, config: RunConfig, *, started_at: float, on_progress: Callable[[str], None] = lambda _: None
    ) -> None:
        """started_at: Unix time of the command's start."""
        self._on_progress = on_progress
        self._config = config
        self._started_at = started_at
        self._folder = config.output_dir
        # Linux kills Redis with the *thread* that started it, so this thread has to live as long as the mesh.
        self._redis_thread = ThreadPoolExecutor(1, thread_name_prefix="redis")
        self._server: EmbeddedRedis | None = None
        self._redis: Redis | None = None
        self._redis_url = config.redis.url or ""
        self._learner: LearnerHost | None = None
        self._ray_temp: Path | None = None
        self._ray: subprocess.Popen[bytes] | None = None
        self._ray_pipe: JsonLines | None = None
        self._shared_memory: set[Path] = set()
        self.timings: dict[str, float] = {}
        """Seconds from the command's start until each part was up."""

    @property
    def redis_url(self) -> str:
        """Redis URL with password; empty before `start`."""
        return self._redis_url

    @property
    def redis_address(self) -> str:
        return redact(self._redis_url)

    async def start(self) -> ControlClient:
        """Start everything and submit the run.

        Raises:
            MeshError: a part can't be started.
            RunExistsError: the run is active in the external Redis.
        """
        adopt_orphans()
        control = self._config.control
        port = control.port or free_port()
        self._start_ray(port)
        await self._start_redis()
        await self._start_learner_early()
        await self._wait_for_ray(UP)
        self._record_timing("ray")
        arguments = LocalControlArgs(
            redis_url=self._redis_url,
            factory=RUN_FACTORY_PATH,
            control=control.model_dump(mode="json"),
            log_dir=str(self._folder / LOGS),
            app=CONTROL_APP,
        )
        self._send_to_ray(arguments)
        await self._wait_for_ray(CONTROL)
        self._record_timing("control")
        url = f"http://{_client_host(control.host)}:{port}"
        client = ControlClient(url, token=control.token)
        await retry_until_answered(lambda: client.create(self._config.model_dump_json()), SUBMIT_TIMEOUT_S)
        write_endpoints(self._folder, Endpoints(os.getpid(), self._redis_url, url))
        return client

    async def _start_redis(self) -> None:
        if self._config.redis.url is None:
            self._server = EmbeddedRedis(self._folder / "redis", self._config.redis)
            await asyncio.get_running_loop().run_in_executor(self._redis_thread, self._server.start)
            self._redis_url = self._server.url
        elif reason := await asyncio.to_thread(connection_problem, self._redis_url):
            raise MeshError(f"redis.url: {reason}")
        self._redis = connect(self._redis_url)
        self._record_timing("redis")

    async def _start_learner_early(self) -> None:
        """Start a CPU learner, because its warm-up is longest."""
        config, redis = self._config, self._redis
        assert redis is not None
        async with connect_async(self._redis_url) as async_redis:
            await RunStore(async_redis).create(run_spec(config), takeover=self._server is not None)
        RedisMetrics(redis, config.exp_name).append(command_started(self._started_at))
        # No process of this run is alive: its files in shared memory are leftovers of a killed command.
        await asyncio.to_thread(cleanup, config.exp_name, config.weights, self._folder)
        await asyncio.to_thread(prepare_folder, config)
        await asyncio.to_thread(prepare_buffer, redis, config)
        await asyncio.to_thread(release_all_workers, redis, config.exp_name)
        if config.control.learner == "managed" and config.actor_train.device == "cpu":
            threads = config.actor_train.num_threads
            standby = config.control.standby_learner
            self._learner = LearnerHost(
                config.exp_name, self._redis_url, self._folder, threads=threads, standby=standby
            )
            await asyncio.to_thread(self._learner.start)
            self._record_timing("learner")

    def _start_ray(self, port: int) -> None:
        """Start Ray's process; it dies with the calling thread."""
        # Not in the run's folder: paths of Unix sockets have to be short.
        _remove_orphaned_temp()
        self._ray_temp = Path(tempfile.mkdtemp(prefix=f"{TEMP_PREFIX}{os.getpid()}-", dir=TEMP_ROOT))
        infer, rollout = self._config.actor_infer, self._config.rollout
        cpus = infer.num_replicas * infer.cpus_per_replica + rollout.num_workers * rollout.cpus_per_worker + SPARE_CPUS
        settings = RaySettings(
            temp_dir=str(self._ray_temp),
            num_cpus=max(math.ceil(cpus), os.cpu_count() or 1),
            object_store_bytes=OBJECT_STORE_BYTES,
            host=self._config.control.host,
            port=port,
            namespace=NAMESPACE,
        )
        logs = self._folder / LOGS
        logs.mkdir(parents=True, exist_ok=True)
        _replace_with_link(logs / "ray", self._ray_temp / "session_latest" / "logs")
        with (logs / RAY_LOG).open("ab") as log:
            self._ray = subprocess.Popen(
                guard_command([sys.executable, "-m", "offbeat.deploy.local.ray_process"]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **RAY_ENVIRONMENT},
                start_new_session=True,
            )
        assert self._ray.stdin is not None
        assert self._ray.stdout is not None
        self._ray_pipe = JsonLines(self._ray.stdout, self._ray.stdin)
        self._send_to_ray(settings)

    def _send_to_ray(self, message: RaySettings | LocalControlArgs) -> None:
        assert self._ray_pipe is not None
        self._ray_pipe.send(asdict(message))  # if the process has exited, `_wait_for_ray` raises

    async def _wait_for_ray(self, expected: str) -> None:
        """Wait for state `expected`.

        Raises:
            MeshError: Ray exited or timed out.
        """
        assert self._ray_pipe is not None
        log = self._folder / LOGS / RAY_LOG
        try:
            async with asyncio.timeout(RAY_STARTUP_TIMEOUT_S):
                while (answer := await asyncio.to_thread(self._ray_pipe.receive)) == {STATE: RETRYING}:
                    logger.warning(SLOW_START_MESSAGE)
                    self._on_progress(SLOW_START_MESSAGE)
        except TimeoutError:
            raise MeshError(f"Ray did not start in {RAY_STARTUP_TIMEOUT_S:.0f} s; see {log}") from None
        if answer != {STATE: expected}:
            raise MeshError(f"Ray failed to start; see {log}")

    async def supervise_redis(self) -> None:
        """Restart a dead or hung embedded Redis; acknowledged writes are kept."""
        last_answer_at = last_ping_at = time.monotonic()
        while (server := self._server) is not None:
            now = time.monotonic()
            if server.is_alive() and now > last_ping_at + REDIS_PING_INTERVAL_S:
                last_ping_at = now
                last_answer_at = time.monotonic() if await asyncio.to_thread(server.answers) else last_answer_at
            if not server.is_alive() or now > last_answer_at + REDIS_HANG_TIMEOUT_S:
                logger.warning("redis-server %s: restarting it", "hangs" if server.is_alive() else "died")
                try:
                    await asyncio.get_running_loop().run_in_executor(self._redis_thread, server.restart)
                except MeshError as error:
                    logger.error("can't restart redis-server, retrying: %s", error)
                last_answer_at = time.monotonic()
            await asyncio.sleep(REDIS_CHECK_INTERVAL_S)

    async def watch_shared_memory(self) -> None:
        """Record shared memory for `stop`: Ray kills resource trackers, too."""
        while True:
            held = await asyncio.to_thread(find_shared_memory)
            self._shared_memory = held | {path for path in self._shared_memory if path.exists()}
            await asyncio.sleep(SHARED_MEMORY_SCAN_INTERVAL_S)

    async def stop_learner(self) -> int:
        """Stop the learner after a checkpoint; return the step (-1 before the first weights).

        On timeout it is left to `stop`.
        """
        if self._redis is None:
            return -1
        try:
            async with connect_async(self._redis_url, patience_s=1.0) as async_redis:
                await RunStore(async_redis).want(self._config.exp_name, DesiredState.STOPPED)
            await asyncio.to_thread(request_stop, self._redis, self._config.exp_name, now=False)
            grace_s = await asyncio.to_thread(_learner_grace_s, self._redis, self._config.exp_name)
            grace_s += STOP_S if has_processes(self._config.track_with) else 0.0
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline:
                status = await asyncio.to_thread(read_status, self._redis, self._config.exp_name)
                if not status.alive:
                    break
                await asyncio.sleep(0.05)
            else:
                logger.warning("the learner did not exit in %.1f s: killing it", grace_s)
            async with connect_async(self._redis_url, patience_s=1.0) as async_redis:
                return (await RunStore(async_redis).progress(self._config.exp_name)).step
        except (RedisError, OSError, UnknownRunError) as error:
            logger.warning("can't request that the learner stop: %s", error)
            return -1

    async def stop(self, outcome: RunState | None = None) -> None:
        """Stop everything. outcome: state to record."""
        await asyncio.to_thread(self._stop, outcome)

    def kill(self) -> None:
        terminate_descendants(0.0)
        remove_orphaned_shared_memory(self._shared_memory)
        self._remove_leftovers()

    def _stop(self, outcome: RunState | None) -> None:
        spared = [self._server.pid] if self._server and self._server.pid else []
        held = self._shared_memory | find_shared_memory()  # before Ray ends its workers in its own way
        self._stop_ray()
        num_killed = terminate_descendants(EXIT_GRACE_S, excluding=spared)
        if num_killed:
            logger.info("killed %d processes that did not exit in %s s", num_killed, EXIT_GRACE_S)
        self._copy_ray_logs()
        if outcome is not None and self._redis is not None:
            self._write_outcome(self._redis, outcome)
        if self._redis is not None:
            self._redis.close()
        if self._server is not None:
            self._server.stop()
        terminate_descendants(EXIT_GRACE_S)
        remove_orphaned_shared_memory(held)
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        cleanup(self._config.exp_name, self._config.weights, self._folder)
        remove_endpoints(self._folder)
        if self._ray_temp is not None:
            shutil.rmtree(self._ray_temp, ignore_errors=True)

    def _stop_ray(self) -> None:
        if self._ray is None or self._ray.stdin is None or "control" not in self.timings:
            return  # it reads no requests while it starts
        with suppress(BrokenPipeError):
            self._ray.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._ray.wait(RAY_SHUTDOWN_TIMEOUT_S)

    def _copy_ray_logs(self) -> None:
        link = self._folder / LOGS / "ray"
        target = link.resolve()
        if link.is_symlink() and target.is_dir():
            link.unlink()
            shutil.copytree(target, link, symlinks=True, ignore_dangling_symlinks=True, dirs_exist_ok=True)

    def _write_outcome(self, redis: Redis, outcome: RunState) -> None:
        changes = {"state": outcome.value, "ended_at": str(time.time())}
        try:
            redis.hset(RunKeys(self._config.exp_name).record, mapping=changes)
        except RedisError as error:
            logger.warning("can't write the run's state %s: %s", outcome, error)

    def _record_timing(self, part: str) -> None:
        self.timings[part] = time.time() - self._started_at


def _learner_grace_s(redis: Redis, run_id: str) -> float:
    raw = cast(bytes | None, redis.hget(RunKeys(run_id).record, "learner_metrics"))
    metrics = json.loads(raw) if raw else {}
    return LEARNER_GRACE_S + 2 * sum(
        metrics.get(f"time/{stage}_s", 0.0) for stage in ("train", "publish", "checkpoint")
    )


def _remove_orphaned_temp() -> None:
    for folder in TEMP_ROOT.glob(f"{TEMP_PREFIX}*-*"):
        pid = folder.name.removeprefix(TEMP_PREFIX).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _client_host(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "localhost") else f"[{host}]" if ":" in host else host


def _replace_with_link(link: Path, target: Path) -> None:
    if link.is_symlink():
        link.unlink()
    elif link.is_dir():
        shutil.rmtree(link)
    link.symlink_to(target)
