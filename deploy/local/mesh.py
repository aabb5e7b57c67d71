"""Mesh of one command: Redis, Ray with Serve, control service, learner.

Invariants: all processes are descendants and die with this one; `stop` works in any state, leaving no process or shared
memory.
"""

import asyncio
import fcntl
import logging
import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import psutil
from redis import Redis
from redis.client import Pipeline
from redis.exceptions import RedisError

from offbeat.deploy.components.learner_host import LearnerHost, read_report, read_status, request_stop
from offbeat.deploy.components.ray_names import CONTROL_APP, NAMESPACE
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.local.processes import (
    adopt_orphans,
    find_shared_memory,
    list_shared_memory,
    remove_orphaned_shared_memory,
    terminate_descendants,
)
from offbeat.deploy.local.ray_head import RayHead
from offbeat.deploy.local.ray_process import LocalControlArgs, RaySettings
from offbeat.deploy.local.supervised_redis import SupervisedRedis
from offbeat.deploy.local.supervision import run_beside
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
from offbeat.services.control.run import DesiredState, LearnerReport, RunState, UnknownRunError
from offbeat.services.control.store import RunStore
from offbeat.services.errors import MeshError
from offbeat.services.keys import RunKeys
from offbeat.services.process import free_port
from offbeat.services.redis.connection import connect, connect_async
from offbeat.services.redis.url import connection_problem, redact
from offbeat.services.retry import retry_until_answered
from offbeat.services.telemetry import RedisMetrics
from offbeat.services.weights.transports.factory import cleanup
from offbeat.trainer.trackers.registry import STOP_S, has_processes

logger = logging.getLogger(__name__)

RUN_FACTORY_PATH = "offbeat.deploy.cluster.run_factory:MeshRunFactory"
OBJECT_STORE_BYTES = 128 * 2**20
"""Data moves through Redis and the broker."""
SPARE_CPUS = 2.0
"""For Ray's own actors."""
TEMP_ROOT, TEMP_PREFIX = Path("/tmp"), "offbeat-"
RAY_LOG = "ray_head.out"
LEARNER_GRACE_S = 4.0
"""Exit time beyond twice the last step's, besides that of a checkpoint."""
EXIT_GRACE_S = 1.0
ANSWER_TIMEOUT_S = 120.0
HEARTBEAT_INTERVAL_S = 2.0
SHARED_MEMORY_SCAN_INTERVAL_S = 1.0


class LocalMesh:
    def __init__(
        self, config: RunConfig, *, started_at: float, on_progress: Callable[[str], None] = lambda _: None
    ) -> None:
        """started_at: Unix time of the command."""
        self._on_progress = on_progress
        self._config = config
        self._id = secrets.token_hex(8)
        self._started_at = started_at
        self._folder = config.output_dir
        embedded = config.redis.url is None
        self._server = SupervisedRedis(self._folder / "redis", config.redis) if embedded else None
        self._redis: Redis | None = None
        self._redis_url = config.redis.url or ""
        self._learner: LearnerHost | None = None
        self._ray_temp: Path | None = None
        self._ray_temp_lock: int | None = None
        self._ray: RayHead | None = None
        self._launched = asyncio.Event()
        self._uid = ""
        self.owns_run = False
        """False if another mesh has the run."""
        self._shared_memory: set[Path] = set()
        self.timings: dict[str, float] = {}
        """Start of each part after the command's, s."""

    @property
    def redis_url(self) -> str:
        """Return the URL with password; empty before `start`."""
        return self._redis_url

    @property
    def redis_address(self) -> str:
        return redact(self._redis_url)

    async def start(self) -> ControlClient:
        """Start everything and record the run; `supervise` has to run concurrently.

        Raises:
            MeshError: a part can't be started.
            RunExistsError: the run is active in the external Redis.
        """
        adopt_orphans()
        port = self._config.control.port or free_port()
        ray = self._ray = self._make_ray(port)
        ray.launch()
        self._launched.set()
        await self._start_redis()
        await self._record_run()
        return await run_beside(self._start_run(ray, port), [self._send_heartbeats()])

    async def _start_run(self, ray: RayHead, port: int) -> ControlClient:
        await self._start_learner_early()
        await ray.wait_until_up()
        self._record_timing("ray")
        control = self._config.control
        await ray.start_control(
            LocalControlArgs(
                redis_url=self._redis_url,
                factory=RUN_FACTORY_PATH,
                control=control.model_dump(mode="json"),
                log_dir=str(self._folder / LOGS),
                app=CONTROL_APP,
                mesh=self._id,
            )
        )
        self._record_timing("control")
        url = f"http://{_client_host(control.host)}:{port}"
        client = ControlClient(url, token=control.token)
        # The run is recorded, and this command has checked it: sent by REST, it would be checked in another process
        await retry_until_answered(lambda: client.show(self._config.exp_name), ANSWER_TIMEOUT_S)
        write_endpoints(self._folder, Endpoints(os.getpid(), self._redis_url, url))
        return client

    async def supervise(self) -> None:
        """Replace dead parts until cancelled; raises `MeshError`."""
        await self._launched.wait()
        assert self._ray is not None
        redis = [] if self._server is None else [self._server.supervise()]
        await run_beside(self.watch_shared_memory(), [*redis, self._ray.supervise()])

    async def _start_redis(self) -> None:
        if self._server is not None:
            await self._server.start()
            self._redis_url = self._server.url
        elif reason := await asyncio.to_thread(connection_problem, self._redis_url):
            raise MeshError(f"redis.url: {reason}")
        self._redis = connect(self._redis_url)
        self._record_timing("redis")

    async def _record_run(self) -> None:
        """Record the run; raises `RunExistsError`."""
        config, redis = self._config, self._redis
        assert redis is not None
        async with connect_async(self._redis_url) as async_redis:
            store = RunStore(async_redis, mesh=self._id)
            record, _ = await store.create(run_spec(config), takeover=self._server is not None)
            self._uid, self.owns_run = record.uid, True
        RedisMetrics(redis, config.exp_name, record.uid).append(command_started(self._started_at))

    async def _send_heartbeats(self) -> None:
        """Keep the run active until the control service does: other starts by its name may share an external Redis."""
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            try:
                if not await asyncio.to_thread(self._write_record, {"beat": str(time.time())}):
                    return
            except RedisError as error:
                logger.warning("can't write the run's heartbeat: %s; retrying", error)

    def _write_record(self, fields: Mapping[str, str]) -> bool:
        """Write fields, unless the run was deleted or another mesh has it; return whether it is this one's."""
        redis, run_id = self._redis, self._config.exp_name
        assert redis is not None
        key, ours = RunKeys(run_id).record, [self._uid.encode(), self._id.encode()]

        def write(pipe: Pipeline) -> list[bytes | None]:
            holder = cast(list[bytes | None], pipe.hmget(key, ["uid", "mesh"]))
            pipe.multi()
            if holder == ours:
                pipe.hset(key, mapping=cast(dict[Any, Any], fields))
            return holder

        holder = redis.transaction(cast(Any, write), key, value_from_callable=True)
        if holder != ours:
            self.owns_run = holder == [None, None]
            what = "was deleted" if self.owns_run else "is another command's by now"
            logger.warning("run %s %s: its record is left as it is", run_id, what)
        return holder == ours

    async def _start_learner_early(self) -> None:
        """Start a CPU learner first: its warm-up is longest."""
        config, redis = self._config, self._redis
        assert redis is not None
        # No process of this run is alive: its files in shared memory are leftovers of a killed command.
        await asyncio.to_thread(cleanup, config.exp_name, config.weights, self._folder)
        await asyncio.to_thread(prepare_folder, config)
        await asyncio.to_thread(prepare_buffer, redis, config, self._uid)
        await asyncio.to_thread(release_all_workers, redis, config.exp_name)
        if config.control.learner == "managed" and config.actor_train.device == "cpu":
            threads = config.actor_train.num_threads
            standby = config.control.standby_learner
            self._learner = LearnerHost(
                config.exp_name, self._redis_url, self._folder, uid=self._uid, threads=threads, standby=standby
            )
            await asyncio.to_thread(self._learner.start)
            self._record_timing("learner")

    def _make_ray(self, port: int) -> RayHead:
        # Not in the run's folder: paths of Unix sockets have to be short.
        _remove_orphaned_temp()
        self._ray_temp = Path(tempfile.mkdtemp(prefix=f"{TEMP_PREFIX}{os.getpid()}-", dir=TEMP_ROOT))
        self._ray_temp_lock = _try_lock(self._ray_temp)
        infer, rollout = self._config.actor_infer, self._config.rollout
        cpus = infer.num_replicas * infer.cpus_per_replica + rollout.num_workers * rollout.cpus_per_worker + SPARE_CPUS
        cpus += sum(reward.num_replicas * reward.cpus_per_replica for reward in self._config.rewards)
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
        return RayHead(settings, logs / RAY_LOG, end_processes=self._end_ray, on_progress=self._on_progress)

    def _end_ray(self) -> None:
        terminate_descendants(EXIT_GRACE_S, excluding=[*self._redis_pids(), *self._learner_pids()])

    def _redis_pids(self) -> list[int]:
        pid = self._server.pid if self._server is not None else None
        return [] if pid is None else [pid]

    def _learner_pids(self) -> list[int]:
        return [] if self._learner is None else self._learner.pids

    async def watch_shared_memory(self) -> None:
        """Record shared memory for `stop`, as Ray kills resource trackers.

        The maps of all processes are read only while a file is new: twice, as a file may be named before it is mapped.
        """
        settled, known = set[Path](), set[Path]()
        while True:
            files = list_shared_memory()
            if files - settled:
                held = await asyncio.to_thread(find_shared_memory)
                self._shared_memory = held | {path for path in self._shared_memory if path.exists()}
            settled, known = known, files
            await asyncio.sleep(SHARED_MEMORY_SCAN_INTERVAL_S)

    async def stop_learner(self) -> int:
        """Stop the learner after a checkpoint, however long that takes; return the step (-1 before the first weights).

        On timeout of the rest it is left to `stop`.
        """
        if self._redis is None or not self.owns_run:
            return -1
        try:
            async with connect_async(self._redis_url, patience_s=1.0) as async_redis:
                store = RunStore(async_redis, orphaned_after_s=math.inf, mesh=self._id)
                await store.want(self._config.exp_name, DesiredState.STOPPED)
            await asyncio.to_thread(request_stop, self._redis, self._config.exp_name, now=False)
            grace_s = _learner_grace_s(await asyncio.to_thread(read_report, self._redis, self._config.exp_name))
            grace_s += STOP_S if has_processes(self._config.track_with) else 0.0
            deadline = time.monotonic() + grace_s
            while True:
                status = await asyncio.to_thread(read_status, self._redis, self._config.exp_name)
                if not status.alive:
                    break
                if (await asyncio.to_thread(read_report, self._redis, self._config.exp_name)).is_saving:
                    deadline = time.monotonic() + grace_s
                elif time.monotonic() > deadline:  # not before a look: this process may have been stalled meanwhile
                    logger.warning("the learner did not exit in %.1f s: killing it", grace_s)
                    break
                await asyncio.sleep(0.05)
            async with connect_async(self._redis_url, patience_s=1.0) as async_redis:
                return (await RunStore(async_redis).components.progress(self._config.exp_name)).step
        except (RedisError, OSError, UnknownRunError) as error:
            logger.warning("can't request that the learner stop: %s", error)
            return -1

    async def stop(self, outcome: RunState | None = None) -> None:
        await asyncio.to_thread(self._stop, outcome)

    def kill(self) -> None:
        terminate_descendants(0.0)
        remove_orphaned_shared_memory(self._shared_memory)
        self._remove_leftovers()

    def _stop(self, outcome: RunState | None) -> None:
        spared = self._redis_pids()
        held = self._shared_memory | find_shared_memory()  # before Ray ends its workers in its own way
        if self._ray is not None:
            self._ray.stop()
        num_killed = terminate_descendants(EXIT_GRACE_S, excluding=spared)
        if num_killed:
            logger.info("killed %d processes that did not exit in %s s", num_killed, EXIT_GRACE_S)
        self._copy_ray_logs()
        if outcome is not None:
            self._write_outcome(outcome)
        if self._redis is not None:
            self._redis.close()
        if self._server is not None:
            self._server.stop()
        terminate_descendants(EXIT_GRACE_S)
        remove_orphaned_shared_memory(held)
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        remove_endpoints(self._folder)
        if self._ray_temp is not None:
            shutil.rmtree(self._ray_temp, ignore_errors=True)
        if self._ray_temp_lock is not None:
            os.close(self._ray_temp_lock)
            self._ray_temp_lock = None
        try:
            cleanup(self._config.exp_name, self._config.weights, self._folder)
        except (MeshError, OSError) as error:
            logger.warning("published versions are left, until the run starts again: %s", error)

    def _copy_ray_logs(self) -> None:
        link = self._folder / LOGS / "ray"
        target = link.resolve()
        if link.is_symlink() and target.is_dir():
            link.unlink()
            try:
                shutil.copytree(target, link, symlinks=True, ignore_dangling_symlinks=True, dirs_exist_ok=True)
            except OSError as error:
                logger.warning("not all of Ray's logs could be copied to %s: %s", link, error)

    def _write_outcome(self, outcome: RunState) -> None:
        redis_is_dead = self._server is not None and self._server.pid is None
        if self._redis is None or not self.owns_run or redis_is_dead:
            return
        try:
            self._write_record({"state": outcome.value, "ended_at": str(time.time())})
        except RedisError as error:
            logger.warning("can't write the run's state %s: %s", outcome, error)

    def _record_timing(self, part: str) -> None:
        self.timings[part] = time.time() - self._started_at


def _learner_grace_s(report: LearnerReport) -> float:
    return LEARNER_GRACE_S + 2 * sum(report.metrics.get(f"time/{stage}_s", 0.0) for stage in ("train", "publish"))


def _try_lock(folder: Path) -> int | None:
    """Return the descriptor that holds a folder's lock until it is closed; None if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_orphaned_temp() -> None:
    """Remove Ray's folders of killed commands. Containers that share /tmp do not see each other's processes."""
    for folder in TEMP_ROOT.glob(f"{TEMP_PREFIX}*-*"):
        pid = folder.name.removeprefix(TEMP_PREFIX).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            with suppress(OSError):
                if (lock := _try_lock(folder)) is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(lock)


def _client_host(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "localhost") else f"[{host}]" if ":" in host else host


def _replace_with_link(link: Path, target: Path) -> None:
    if link.is_symlink():
        link.unlink()
    elif link.is_dir():
        shutil.rmtree(link)
    link.symlink_to(target)
