# pyright: basic
"""Managed and external learners."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from redis import Redis

from offbeat.deploy.components import ray_names
from offbeat.deploy.components.learner_host import (
    LEARNER_LOG,
    LearnerHost,
    read_status,
    request_stop,
)
from offbeat.deploy.components.placement import place
from offbeat.deploy.components.ray_actors import kill_actor, kill_and_wait
from offbeat.deploy.config.device_plan import LearnerNode
from offbeat.deploy.config.run import RunConfig
from offbeat.services.control.interfaces import Health, Observation
from offbeat.services.devices import VISIBLE, parent_visible, visible_devices
from offbeat.services.errors import ControlError, RetryableError
from offbeat.services.keys import ENDING, RunKeys
from offbeat.services.weights.config import WeightsConfig
from offbeat.trainer.cli import REDIS_VARIABLE
from offbeat.trainer.engines.node_ranks import RANKS_PER_NODE, encode_ranks
from offbeat.trainer.process.heartbeat import HEARTBEAT_TIMEOUTS
from offbeat.trainer.process.remote_ranks import FollowerHost

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
NO_RETRY_EXIT_CODE = 2
"""Unusable configuration or checkpoint."""
RUN_OVER_EXIT_CODE = 4
"""Of a learner started beside a finished one, after Redis forgot its status."""


class LearnerHostActor:
    def __init__(
        self,
        run_id: str,
        uid: str,
        redis_url: str,
        output_dir: Path,
        threads: int,
        standby: bool,
        nodes: Sequence[LearnerNode],
    ) -> None:
        """nodes: of the learner, this one first; empty: Ray chose the devices."""
        self._run_id = run_id
        self._uid = uid
        self._output_dir = output_dir
        environment = _rank_environment(nodes[0]) if nodes else {}
        if len(nodes) > 1:
            environment[RANKS_PER_NODE] = encode_ranks(node.ranks for node in nodes)
        self._host = LearnerHost(
            run_id, redis_url, output_dir, uid=uid, threads=threads, standby=standby, environment=environment
        )

    def start(self, uid: str) -> bool:
        """Start a missing learner; return False for another run."""
        if uid != self._uid:
            return False
        self._host.start()
        return True

    def stop(self, grace_s: float) -> None:
        from offbeat.services.weights.transports.factory import cleanup  # noqa: PLC0415

        self._host.stop(grace_s)
        cleanup(self._run_id, WeightsConfig(), self._output_dir)


class FollowerHostActor:
    """Host of the ranks on a further node."""

    def __init__(
        self,
        run_id: str,
        redis_url: str,
        output_dir: Path,
        threads: int,
        position: int,
        node: LearnerNode,
        timeout_s: float,
    ) -> None:
        """position: of the node among the learner's."""
        log = output_dir / LEARNER_LOG.replace("learner", f"learner-node{position}")
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            REDIS_VARIABLE: redis_url,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONUNBUFFERED": "1",
            **_rank_environment(node),
        }
        self._host = FollowerHost(run_id, redis_url, position, timeout_s=timeout_s, environment=environment, log=log)

    def start(self) -> None:
        self._host.start()


def _rank_environment(node: LearnerNode) -> dict[str, str]:
    return {VISIBLE: visible_devices(node.devices, parent_visible())} if node.devices else {}


class ManagedLearner:
    name = "learner"

    def __init__(self, config: RunConfig, redis: Redis, redis_url: str, uid: str = "") -> None:
        self._config = config
        self._redis = redis
        self._redis_url = redis_url
        self._uid = uid
        self._run_id = config.exp_name
        self._actor_name = ray_names.learner_host_name(self._run_id)
        self._reported_death = ""
        """Last incarnation reported as replaced."""

    async def ensure(self) -> None:
        """Start a missing learner, unless Serve is shutting down."""
        status = await asyncio.to_thread(read_status, self._redis, self._run_id)
        if not status.alive and not await asyncio.to_thread(self._redis.exists, ENDING):
            await asyncio.to_thread(self._start)

    def _start(self) -> None:
        if self._start_in_actors():
            return
        logger.warning("run %s: the learner's host is of an earlier run of this name and is replaced", self._run_id)
        kill_and_wait(self._actor_name)
        if not self._start_in_actors():
            raise RetryableError(f"actor {self._actor_name} is of another run of this name")

    def _start_in_actors(self) -> bool:
        """Start the hosts of rank 0 and other nodes; return False if the former is of another run."""
        config, train = self._config, self._config.actor_train
        nodes = place(config).learner
        folder, threads = config.output_dir.resolve(), train.num_threads
        host = ray.remote(LearnerHostActor).options(**self._host_options(nodes))
        standby = config.control.standby_learner
        leader = host.remote(self._run_id, self._uid, self._redis_url, folder, threads, standby, nodes)
        followers: list[Any] = []
        timeout_s = HEARTBEAT_TIMEOUTS * config.buffer.learner_timeout_s
        for position, node in enumerate(nodes[1:], start=1):
            options = _actor_options(ray_names.follower_host_name(self._run_id, position), node)
            follower = ray.remote(FollowerHostActor).options(**options)
            arguments = (self._run_id, self._redis_url, folder, threads, position, node, timeout_s)
            followers.append(follower.remote(*arguments))
        starts = [leader.start.remote(self._uid), *(each.start.remote() for each in followers)]
        try:
            return ray.get(starts, timeout=START_TIMEOUT_S)[0]
        except RayTaskError as error:
            raise error.cause from error
        except GetTimeoutError as error:
            raise ControlError(f"the learner's devices are not free within {START_TIMEOUT_S:g} s") from error

    def _host_options(self, nodes: Sequence[LearnerNode]) -> dict[str, Any]:
        """Return options of rank 0's host, after the end of hosts on other nodes or devices."""
        if nodes:
            self._kill_followers()
            kill_and_wait(self._actor_name)
            return _actor_options(self._actor_name, nodes[0])
        num_gpus = self._num_ranks if self._config.actor_train.device == "cuda" else 0
        return _actor_options(self._actor_name) | {"num_gpus": num_gpus}

    @property
    def _num_ranks(self) -> int:
        return self._config.actor_train.num_processes + self._config.num_critic_processes

    def _kill_followers(self) -> None:
        for position in range(1, self._num_ranks):
            kill_and_wait(ray_names.follower_host_name(self._run_id, position))

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
        await asyncio.to_thread(self._kill_followers)


def _actor_options(name: str, node: LearnerNode | None = None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "name": name,
        "namespace": ray_names.NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_concurrency": 2,
    }
    if node is not None:
        strategy = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        options |= {"num_gpus": node.num_exclusive, "scheduling_strategy": strategy}
    return options


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
