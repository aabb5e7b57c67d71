# pyright: basic
"""Managed and external learners."""

import asyncio
import logging
import time
from pathlib import Path

import ray
from ray.exceptions import RayTaskError
from redis import Redis

from offbeat.deploy.components import ray_actors
from offbeat.deploy.components.learner_host import (
    LEARNER_LOG,
    LearnerHost,
    read_status,
    request_stop,
)
from offbeat.deploy.components.ray_actors import find_actor, kill_actor
from offbeat.deploy.config.run import RunConfig
from offbeat.services.control.interfaces import Health, Observation
from offbeat.services.errors import RetryableError
from offbeat.services.keys import ENDING, RunKeys
from offbeat.services.weights.config import WeightsConfig

logger = logging.getLogger(__name__)

KILL_TIMEOUT_S = 10.0
"""Until a killed actor's name is free."""
NO_RETRY_EXIT_CODE = 2
"""Unusable configuration or checkpoint."""
RUN_OVER_EXIT_CODE = 4
"""Of a learner started beside one that finished, after Redis forgot its status."""


class LearnerHostActor:
    def __init__(self, run_id: str, uid: str, redis_url: str, output_dir: Path, threads: int, standby: bool) -> None:
        self._run_id = run_id
        self._uid = uid
        self._output_dir = output_dir
        self._host = LearnerHost(run_id, redis_url, output_dir, uid=uid, threads=threads, standby=standby)

    def start(self, uid: str) -> bool:
        """Start a missing learner; return False for a run other than the actor's."""
        if uid != self._uid:
            return False
        self._host.start()
        return True

    def stop(self, grace_s: float) -> None:
        from offbeat.services.weights.transports.factory import cleanup  # noqa: PLC0415

        self._host.stop(grace_s)
        cleanup(self._run_id, WeightsConfig(), self._output_dir)


class ManagedLearner:
    name = "learner"

    def __init__(self, config: RunConfig, redis: Redis, redis_url: str, uid: str = "") -> None:
        """uid: of the run's record."""
        self._config = config
        self._redis = redis
        self._redis_url = redis_url
        self._uid = uid
        self._run_id = config.exp_name
        self._actor_name = ray_actors.learner_host_name(self._run_id)
        self._reported_death = ""
        """Last incarnation reported as replaced by the standby."""

    async def ensure(self) -> None:
        """Start a missing learner, unless Serve is shutting down."""
        status = await asyncio.to_thread(read_status, self._redis, self._run_id)
        if not status.alive and not await asyncio.to_thread(self._redis.exists, ENDING):
            await asyncio.to_thread(self._start)

    def _start(self) -> None:
        if self._start_in_actor():
            return
        logger.warning("run %s: the learner's host is of an earlier run of this name and is replaced", self._run_id)
        kill_actor(self._actor_name)
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while find_actor(self._actor_name) is not None:
            if time.monotonic() > deadline:
                raise RetryableError(f"actor {self._actor_name} of an earlier run of this name does not end")
            time.sleep(0.05)
        if not self._start_in_actor():
            raise RetryableError(f"actor {self._actor_name} is of another run of this name")

    def _start_in_actor(self) -> bool:
        train = self._config.actor_train
        gpus = train.num_processes if train.device == "cuda" else 0
        options = {"num_cpus": 0, "num_gpus": gpus, "max_concurrency": 2}
        actor = (
            ray.remote(LearnerHostActor)
            .options(
                name=self._actor_name,
                namespace=ray_actors.NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                **options,
            )
            .remote(
                self._run_id,
                self._uid,
                self._redis_url,
                self._config.output_dir.resolve(),
                train.num_threads,
                self._config.control.standby_learner,
            )
        )
        try:
            return ray.get(actor.start.remote(self._uid), timeout=60.0)
        except RayTaskError as error:
            raise error.cause from error

    async def stop(self, *, now: bool) -> None:
        await asyncio.to_thread(request_stop, self._redis, self._run_id, now=now)

    async def observe(self) -> Observation:
        status = await asyncio.to_thread(read_status, self._redis, self._run_id)
        if not status.started:
            return Observation(Health.ABSENT)
        if status.alive and status.died and status.died != self._reported_death and not status.stopping:
            self._reported_death = status.died
            return Observation(
                Health.DEAD, f"{status.death_reason}; the standby has taken over", LEARNER_LOG, status.died
            )
        if status.alive:
            if await asyncio.to_thread(self._redis.exists, RunKeys(self._run_id).progress):
                return Observation(Health.READY, log=LEARNER_LOG)
            return Observation(Health.STARTING, "preparing version 0", LEARNER_LOG)
        if status.stopping:
            return Observation(Health.ABSENT, status.end_reason, LEARNER_LOG)
        if status.exit_code in (0, RUN_OVER_EXIT_CODE):
            if await asyncio.to_thread(has_finished, self._redis, self._run_id):
                return Observation(Health.DONE, "trained all steps", LEARNER_LOG)
            if status.exit_code == 0:
                return Observation(Health.DEAD, "exited before the last step", LEARNER_LOG, status.incarnation)
        health = Health.BROKEN if status.exit_code == NO_RETRY_EXIT_CODE else Health.DEAD
        return Observation(health, status.end_reason, LEARNER_LOG, status.incarnation)

    async def forget(self) -> None:
        await asyncio.to_thread(kill_actor, self._actor_name)


def has_finished(redis: Redis, run_id: str) -> bool:
    return redis.hget(RunKeys(run_id).record, "learner_phase") == b"finished"


class ExternalLearner:
    name = "learner"

    def __init__(self, config: RunConfig, redis: Redis) -> None:
        self._run_id = config.exp_name
        self._max_steps = config.max_steps
        self._redis = redis

    async def ensure(self) -> None:
        """Do nothing: a user attaches it."""

    async def stop(self, *, now: bool) -> None:
        """With `now`, reject further writes."""
        if now:
            await asyncio.to_thread(self._redis.incr, RunKeys(self._run_id).epoch)
            await asyncio.to_thread(self._redis.delete, RunKeys(self._run_id).lease)

    async def observe(self) -> Observation:
        if await asyncio.to_thread(has_finished, self._redis, self._run_id):
            return Observation(Health.DONE, "trained all steps")
        if await asyncio.to_thread(self._redis.exists, RunKeys(self._run_id).lease):
            return Observation(Health.READY)
        return Observation(Health.ABSENT, f"waits for `offbeat learner attach {self._run_id}`")
