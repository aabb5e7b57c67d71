# pyright: basic
"""Env workers as Ray actors; the process exits if its loop ends, so that Ray restarts it."""

import asyncio
import gc
import json
import logging
import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from redis import exceptions as redis_errors
from redis.asyncio import Redis

from offbeat.services.awake_clock import AwakeClock
from offbeat.services.buffer.worker_client import AsyncRolloutBuffer
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.chat.tool_templates import load_playing_format
from offbeat.services.errors import ForeignRunError
from offbeat.services.generation.client import GenerationClient, NoGeneration, ServeGenerationClient
from offbeat.services.keys import RunKeys
from offbeat.services.log_format import set_process_log_fields
from offbeat.services.process import freeze_started, uncollected_imports
from offbeat.services.redis.connection import connect_async
from offbeat.services.redis.errors import retryable
from offbeat.services.redis.run_writes import AsyncRunWrites
from offbeat.services.rollout.config import WorkerSettings
from offbeat.services.rollout.data.prompts import PromptSource, open_prompts
from offbeat.services.rollout.data.source import open_data
from offbeat.services.rollout.rewards import DatasetColumns, EpisodeRewards
from offbeat.services.rollout.worker import EnvWorker, WorkerEnd
from offbeat.services.telemetry import AsyncRedisMetrics, MetricRecord, configure_logging
from offbeat.services.weights.replica_reports import ReplicaLoad, decode_report

LEAST_YOUNG_OBJECTS = 20_000
"""Threshold of the youngest generation; Python's 700 is a few turns."""
OBJECTS_PER_EPISODE = 100
"""Objects released together per concurrent episode; live episodes make cyclic garbage rare and costly to find."""
YOUNG_PER_MIDDLE, MIDDLE_PER_OLD = 20, 20


def tune_garbage_collector(episodes: int) -> None:
    freeze_started()
    gc.set_threshold(max(LEAST_YOUNG_OBJECTS, OBJECTS_PER_EPISODE * episodes), YOUNG_PER_MIDDLE, MIDDLE_PER_OLD)


logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
MAX_RESTARTS = -1
"""Unlimited."""
MAX_LOAD_AGE_S = 5.0
"""Of a replica's load; a replica that died says nothing, and its report stays until the broker removes it."""


def worker_name(run_id: str, index: int | str) -> str:
    """Return the actor's name and buffer id; the names' common prefix for an empty index."""
    return f"env-worker-{run_id}-{index}"


def load_format(settings: WorkerSettings) -> ChatFormat | None:
    """Load the policy's chat format; None if nothing is sampled, as rows may have a template that no policy can play by."""
    if not settings.generation_app:
        return None
    with uncollected_imports():  # of transformers
        return load_playing_format(settings.model_folder)


def build_rewards(
    settings: WorkerSettings, prompts: PromptSource | None, chat: ChatFormat | None
) -> EpisodeRewards | None:
    """Build a worker's rewards, on its event loop; raises ValueError."""
    if settings.rewards is None:
        return None
    assert chat is not None, "rewards are of sampled answers"
    # HTTP clients and all kinds of rewards, which a run without rewards does not need
    from offbeat.services.reward.factory import make_scorer  # noqa: PLC0415

    scorer = make_scorer(settings.rewards, run_id=settings.run_id)
    columns = None if prompts is None or settings.data is None else DatasetColumns(settings.data, prompts)
    return EpisodeRewards(settings.rewards, scorer, chat, columns)


class EnvWorkerActor:
    def __init__(self, index: int, settings: dict[str, Any]) -> None:
        self._settings = WorkerSettings.model_validate(settings, strict=False)
        self._name = worker_name(self._settings.run_id, index)
        os.environ.update(self._settings.environment)
        configure_logging(self._name, self._settings.output_dir / "logs")
        set_process_log_fields(run=self._settings.run_id)
        self._chat = load_format(self._settings)
        if self._chat is not None and self._chat.rewrites:
            logger.info("turns whose history is rewritten become segments of their own: %s", self._chat.rewrites)
        self._worker: EnvWorker | None = None
        self._run_task = asyncio.get_running_loop().create_task(self._run())

    async def alive(self, num_workers: int | None = None) -> dict[str, Any]:
        """Return name, process id, readiness and number of episodes. num_workers: the run's."""
        worker = self._worker
        if worker and num_workers:
            worker.share_with(num_workers)
        playing = worker.num_playing if worker else 0
        return {"name": self._name, "pid": os.getpid(), "ready": worker is not None, "playing": playing}

    async def drain(self) -> None:
        """Claim no more episodes."""
        if self._worker:
            self._worker.drain()

    async def stop(self) -> None:
        """Return all episodes and exit; the caller may see the actor's death."""
        if self._worker:
            self._worker.stop()
            await self._run_task
        # `exit_actor` would wait for calls that still run, such as those that hang.
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    async def _run(self) -> None:
        logger.info("%s started in process %d", self._name, os.getpid())
        run_id, uid = self._settings.run_id, self._settings.run_uid
        redis = connect_async(self._settings.redis_url, run_id=run_id)
        try:
            clock = AwakeClock()
            generation = await self._find_generation(clock)
            prompts = await asyncio.to_thread(open_prompts, self._settings)
            self._worker = EnvWorker(
                self._settings,
                self._name,
                buffer=AsyncRolloutBuffer(redis, run_id, uid),
                generation=generation,
                metrics=_RetryableMetrics(redis, run_id, uid),
                chat=self._chat,
                data=await asyncio.to_thread(open_data, self._settings),
                prompts=prompts,
                rewards=build_rewards(self._settings, prompts, self._chat),
                board=WaitStatusWriter(redis, run_id, uid),
                read_loads=partial(read_loads, redis, run_id),
                clock=clock,
            )
            tune_garbage_collector(self._settings.rollout.max_env_num_per_worker)
            logger.info("%s is ready", self._name)
            end = await self._worker.run()
        except ForeignRunError as error:
            logger.error("%s: this worker belongs to an earlier one, and exits", error)
            ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
        except Exception:
            logger.exception("the worker's loop failed; restarting the process")
            os._exit(1)
        await redis.aclose()
        if end is WorkerEnd.WORN_OUT:
            logger.error("too many threads hang in envs or rewards; restarting the process")
            os._exit(1)
        logger.info("%s has stopped", self._name)

    async def _find_generation(self, clock: AwakeClock) -> GenerationClient:
        if not self._settings.generation_app:
            return NoGeneration()
        while True:
            try:
                run_id = self._settings.run_id if self._settings.names_run else ""
                return await asyncio.to_thread(
                    ServeGenerationClient,
                    self._settings.generation_app,
                    clock,
                    run_id,
                    returns_routing=self._settings.returns_routing,
                )
            except (RayError, RayServeException, KeyError) as error:  # KeyError: Serve runs, the application does not
                logger.info("generation is unavailable: %s; retrying", error)
                await asyncio.sleep(POLL_INTERVAL_S)


class WaitStatusWriter:
    def __init__(self, redis: Redis, run_id: str, uid: str) -> None:
        self._redis = redis
        self._write = AsyncRunWrites(redis, run_id, uid)
        self._key = RunKeys(run_id).doing

    async def show(self, worker_id: str, report: Mapping[str, Any]) -> None:
        """Write a report with `received`, the time of Redis' clock, since nodes' clocks differ."""
        try:
            now_s, now_us = await self._redis.time()
            await self._write("HSET", self._key, worker_id, json.dumps({**report, "received": now_s + now_us / 1e6}))
        except (redis_errors.ConnectionError, redis_errors.TimeoutError) as error:
            raise retryable(error) from error


async def read_loads(redis: Redis, run_id: str) -> Mapping[str, ReplicaLoad]:
    """Return the load of replicas that reported it of late, by Redis' clock; raises `RetryableError`."""
    try:
        async with redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(RunKeys(run_id).served)
            pipe.time()
            blobs, (now_s, now_us) = await pipe.execute()
    except (redis_errors.ConnectionError, redis_errors.TimeoutError) as error:
        raise retryable(error) from error
    now = time.time()
    ahead_s = now - now_s - now_us / 1e6
    reports = {name.decode(): decode_report(blob).shift_clock(ahead_s) for name, blob in blobs.items()}
    return {name: report.load for name, report in reports.items() if now - report.at < MAX_LOAD_AGE_S}


class _RetryableMetrics:
    def __init__(self, redis: Redis, run_id: str, uid: str) -> None:
        self._metrics = AsyncRedisMetrics(redis, run_id, uid)

    async def append(self, record: MetricRecord) -> None:
        try:
            await self._metrics.append(record)
        except (redis_errors.ConnectionError, redis_errors.TimeoutError) as error:
            raise retryable(error) from error


def build(index: int, settings: WorkerSettings, *, namespace: str) -> Any:
    """Start or find the detached actor."""
    return (
        ray.remote(EnvWorkerActor)
        .options(
            name=worker_name(settings.run_id, index),
            namespace=namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=settings.rollout.cpus_per_worker,
            max_restarts=MAX_RESTARTS,
            max_task_retries=0,
        )
        .remote(index, settings.model_dump(mode="json"))
    )


async def stop_worker(run_id: str, index: int, *, namespace: str, grace_s: float = 5.0) -> None:
    """Stop a worker after it returns its episodes, or kill it."""
    try:
        actor = await asyncio.to_thread(ray.get_actor, worker_name(run_id, index), namespace=namespace)
    except ValueError:
        return
    try:
        async with asyncio.timeout(grace_s):
            await actor.stop.remote()  # pyright: ignore[reportGeneralTypeIssues]
    except (RayError, TimeoutError) as error:
        logger.warning("%s did not stop: %r; killing it", worker_name(run_id, index), error)
    ray.kill(actor, no_restart=True)
