# pyright: basic
"""Pool of env workers."""

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

import ray
from ray.actor import ActorHandle

from offbeat.deploy.components import ray_names
from offbeat.deploy.components.actor_pool import ActorPool
from offbeat.deploy.components.ray_actors import find_actor
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.run_setup import worker_settings
from offbeat.services.control.interfaces import Health, Observation
from offbeat.services.rollout import actor as rollout_app


class WorkerPool(ActorPool):
    name = "env-workers"

    def __init__(self, config: RunConfig, redis_url: str, uid: str = "") -> None:
        super().__init__()
        self._run_id = config.exp_name
        self._num_workers = config.rollout.num_workers
        self._settings = worker_settings(config, redis_url, uid=uid)

    @property
    def _names(self) -> list[str]:
        return [rollout_app.worker_name(self._run_id, index) for index in range(self._num_workers)]

    async def resize(self, num_workers: int) -> None:
        """Set the number: `ensure` starts missing workers; surplus ones exit."""
        self._num_workers = num_workers
        for index in itertools.count(num_workers):
            actor = await asyncio.to_thread(find_actor, rollout_app.worker_name(self._run_id, index))
            if actor is None:
                return
            actor.stop.remote()

    async def ensure(self) -> None:
        for index in range(self._num_workers):
            await asyncio.to_thread(rollout_app.build, index, self._settings, namespace=ray_names.NAMESPACE)

    async def stop(self, *, now: bool) -> None:
        """Stop workers; with `now`, episodes are reassigned on heartbeat timeout."""
        for index in itertools.count():
            actor = await asyncio.to_thread(find_actor, rollout_app.worker_name(self._run_id, index))
            if actor is None and index >= self._num_workers:
                return
            if actor is None:
                continue
            if now:
                await asyncio.to_thread(ray.kill, actor, no_restart=True)
            else:
                actor.stop.remote()

    def _ping(self, actor: ActorHandle) -> "ray.ObjectRef[Any]":
        return actor.alive.remote(self._num_workers)

    def _judge(self, answer: Mapping[str, Any], log: str) -> Observation:  # noqa: ARG002
        return Observation(Health.READY, log=log)
