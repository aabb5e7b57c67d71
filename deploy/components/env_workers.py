# pyright: basic
"""Pool of env workers."""

import asyncio
import itertools
import logging
import time
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError

from offbeat.deploy.components import ray_actors
from offbeat.deploy.components.ray_actors import find_actor, last_line
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.run_setup import LOGS, worker_settings
from offbeat.services.control.interfaces import Health, Observation
from offbeat.services.rollout import actor as rollout_app

logger = logging.getLogger(__name__)

PING_TIMEOUT_S = 2.0
"""Limit before an unresponsive actor counts as starting; dead ones fail at once."""
HANG_TIMEOUT_S = 60.0
"""Limit before an unresponsive started worker is replaced."""


class WorkerPool:
    """Env workers; Ray restarts dead ones."""

    name = "env-workers"

    def __init__(self, config: RunConfig, redis_url: str, uid: str = "") -> None:
        self._run_id = config.exp_name
        self._num_workers = config.rollout.num_workers
        self._answered: dict[str, float] = {}
        """Monotonic time of each worker's last answer."""
        self._settings = worker_settings(config, redis_url, uid=uid)

    @property
    def _names(self) -> list[str]:
        return [rollout_app.worker_name(self._run_id, index) for index in range(self._num_workers)]

    async def resize(self, num_workers: int) -> None:
        """Set the number: `ensure` starts missing workers, surplus ones exit."""
        self._num_workers = num_workers
        for index in itertools.count(num_workers):
            actor = await asyncio.to_thread(find_actor, rollout_app.worker_name(self._run_id, index))
            if actor is None:
                return
            actor.stop.remote()

    async def ensure(self) -> None:
        for index in range(self._num_workers):
            await asyncio.to_thread(rollout_app.build, index, self._settings, namespace=ray_actors.NAMESPACE)

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

    async def observe(self) -> Observation:
        observations = await asyncio.gather(*(self._observe_one(name) for name in self._names))
        for health in (Health.DEAD, Health.ABSENT, Health.STARTING):
            matching = [observation for observation in observations if observation.health is health]
            if matching:
                count = f" ({len(matching)} of {len(observations)})" if len(observations) > 1 else ""
                first = matching[0]
                # ABSENT also if only some are missing: `ensure` starts those.
                return Observation(health, f"{first.detail}{count}", first.log, first.incident)
        return Observation(Health.READY)

    async def _observe_one(self, name: str) -> Observation:
        log = f"{LOGS}/{name}.log"
        actor = await asyncio.to_thread(find_actor, name)
        if actor is None:
            return Observation(Health.ABSENT, log=log)
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                await asyncio.shield(_as_future(actor.alive.remote(self._num_workers)))
        except (TimeoutError, ActorUnavailableError):
            return await self._observe_unresponsive(name, actor, log)
        except RayActorError as error:
            return Observation(Health.DEAD, last_line(str(error)), log, actor._actor_id.hex())
        self._answered[name] = time.monotonic()
        return Observation(Health.READY, log=log)

    async def _observe_unresponsive(self, name: str, actor: ActorHandle, log: str) -> Observation:
        """Return STARTING before the first answer; kill a hung worker."""
        last_answer_at = self._answered.get(name)
        if last_answer_at is None:
            return Observation(Health.STARTING, "starting", log)
        silent_s = time.monotonic() - last_answer_at
        if silent_s < HANG_TIMEOUT_S:
            return Observation(Health.STARTING, f"has not answered for {silent_s:.0f} s", log)
        logger.error("%s has not answered for %.0f s: killed", name, silent_s)
        del self._answered[name]
        # no_restart: Ray does not always restart an actor whose node has died; `ensure` creates a new one.
        await asyncio.to_thread(ray.kill, actor, no_restart=True)
        return Observation(Health.DEAD, f"hung for {silent_s:.0f} s", log, f"hung at {last_answer_at}")


async def _as_future(reference: "ray.ObjectRef[Any]") -> Any:
    return await reference
