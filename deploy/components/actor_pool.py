# pyright: basic
"""Named actors of one kind."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError

from offbeat.deploy.components.ray_actors import find_actor, last_line
from offbeat.deploy.run_setup import LOGS
from offbeat.services.control.interfaces import Health, Observation

logger = logging.getLogger(__name__)

PING_TIMEOUT_S = 2.0
"""Limit of an answer; dead actors fail at once."""
HANG_TIMEOUT_S = 60.0
"""Silence after which a started actor is replaced."""


class ActorPool(ABC):
    """Pool of detached actors; Ray restarts dead ones."""

    def __init__(self) -> None:
        self._answered: dict[str, float] = {}
        """Monotonic time of each actor's last answer."""

    @property
    @abstractmethod
    def _names(self) -> Sequence[str]: ...

    @abstractmethod
    def _ping(self, actor: ActorHandle) -> "ray.ObjectRef[Any]": ...

    @abstractmethod
    def _judge(self, answer: Mapping[str, Any], log: str) -> Observation:
        """Return the state by a ping's answer."""

    async def observe(self) -> Observation:
        observations = await asyncio.gather(*(self._observe_one(name) for name in self._names))
        for health in (Health.BROKEN, Health.DEAD, Health.ABSENT, Health.STARTING):
            matching = [observation for observation in observations if observation.health is health]
            if matching:
                count = f"{len(matching)} of {len(observations)}" if len(observations) > 1 else ""
                first = matching[0]
                detail = f"{first.detail} ({count})" if first.detail and count else first.detail or count
                # ABSENT also if only some are missing: `ensure` starts those.
                return Observation(health, detail, first.log, first.incident)
        return Observation(Health.READY)

    async def _observe_one(self, name: str) -> Observation:
        log = f"{LOGS}/{name}.log"
        actor = await asyncio.to_thread(find_actor, name)
        if actor is None:
            return Observation(Health.ABSENT, log=log)
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                answer = await asyncio.shield(_as_task(self._ping(actor)))
        except (TimeoutError, ActorUnavailableError):
            return await self._observe_unresponsive(name, actor, log)
        except RayActorError as error:
            return Observation(Health.DEAD, last_line(str(error)), log, actor._actor_id.hex())
        self._answered[name] = time.monotonic()
        return self._judge(answer, log)

    async def _observe_unresponsive(self, name: str, actor: ActorHandle, log: str) -> Observation:
        """Return STARTING before the first answer; kill a hung actor."""
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


def _as_task(reference: "ray.ObjectRef[Any]") -> "asyncio.Task[Any]":
    """Return a task whose error need not be retrieved, as after a timeout."""

    async def get() -> Any:
        return await reference

    task = asyncio.create_task(get())
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task
