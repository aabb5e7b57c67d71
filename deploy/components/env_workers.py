# pyright: basic
"""Pool of env workers."""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.actor import ActorHandle

from offbeat.deploy.components import ray_names
from offbeat.deploy.components.actor_pool import ActorPool
from offbeat.deploy.components.ray_actors import find_actor, list_actor_names
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.run_setup import worker_settings
from offbeat.services.control.interfaces import Health, Observation
from offbeat.services.rollout import actor as rollout_app

logger = logging.getLogger(__name__)

STOP_GRACE_S = 30.0
"""Time to exit of a worker that is told to stop, beside that of its agents."""


class WorkerPool(ActorPool):
    name = "env-workers"

    def __init__(self, config: RunConfig, redis_url: str, uid: str = "") -> None:
        super().__init__()
        self._run_id = config.exp_name
        self._num_workers = config.rollout.num_workers
        self._settings = worker_settings(config, redis_url, uid=uid)
        self._stopping: dict[str, float] = {}
        """Monotonic time at which each worker was first told to stop."""

    @property
    def _names(self) -> list[str]:
        return [rollout_app.worker_name(self._run_id, index) for index in range(self._num_workers)]

    async def resize(self, num_workers: int) -> None:
        """Set the number: `ensure` starts missing workers; surplus ones exit."""
        self._num_workers = num_workers
        await self._stop(num_workers, now=False)

    async def ensure(self) -> None:
        for index in range(self._num_workers):
            await asyncio.to_thread(rollout_app.build, index, self._settings, namespace=ray_names.NAMESPACE)

    async def stop(self, *, now: bool) -> None:
        """Stop workers; with `now`, episodes are reassigned on heartbeat timeout."""
        await self._stop(0, now=now)

    async def _stop(self, first: int, *, now: bool) -> None:
        """Stop the workers from an index on, which may have gaps; kill one that has not exited in time."""
        prefix = rollout_app.worker_name(self._run_id, "")
        running = [name for name in await asyncio.to_thread(list_actor_names) if name.startswith(prefix)]
        indexes = {name: name.removeprefix(prefix) for name in running}
        surplus = [name for name, index in indexes.items() if index.isdecimal() and int(index) >= first]
        self._stopping = {name: self._stopping.get(name, time.monotonic()) for name in surplus}
        for name, since in self._stopping.items():
            actor = await asyncio.to_thread(find_actor, name)
            if actor is None:
                continue
            if now or time.monotonic() > since + STOP_GRACE_S + self._settings.agent_grace_s:
                logger.info("%s is killed", name)
                await asyncio.to_thread(ray.kill, actor, no_restart=True)
            else:
                actor.stop.remote()

    def _ping(self, actor: ActorHandle) -> "ray.ObjectRef[Any]":
        return actor.alive.remote(self._num_workers)

    def _judge(self, answer: Mapping[str, Any], log: str) -> Observation:  # noqa: ARG002
        return Observation(Health.READY, log=log)
