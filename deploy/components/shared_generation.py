# pyright: basic
"""Deployed generation application, only claimed and released."""

import asyncio
from typing import cast

from redis import Redis

from offbeat.deploy.components.serve_app import ServeApp
from offbeat.deploy.components.serve_status import ServeStatus
from offbeat.services.control.interfaces import Health, Observation
from offbeat.services.errors import ControlError
from offbeat.services.generation.tenancy import APP, read_offers
from offbeat.services.keys import claims_key


class SharedGeneration:
    name = "generation"

    def __init__(self, run_id: str, app: str, redis: Redis, status: ServeStatus) -> None:
        self._run_id = run_id
        self._app = app
        self._redis = redis
        self._serve_app = ServeApp(self.name, app, _reject_deployment, status)

    async def ensure(self) -> None:
        """Claim the application; raises `ControlError` if taken."""
        await asyncio.to_thread(self._redis.hsetnx, claims_key(APP), self._app, self._run_id)
        holder = await asyncio.to_thread(self._holder)
        if holder != self._run_id:
            raise ControlError(f"application {self._app!r} serves run {holder!r}")

    async def resize(self, num_replicas: int) -> None:
        """Do nothing; the deploy file sets it."""

    async def stop(self, *, now: bool) -> None:  # noqa: ARG002
        if await asyncio.to_thread(self._holder) == self._run_id:
            await asyncio.to_thread(self._redis.hdel, claims_key(APP), self._app)

    async def observe(self) -> Observation:
        """Return STARTING if missing or broken."""
        if await asyncio.to_thread(self._holder) != self._run_id:
            return Observation(Health.ABSENT)
        observation = await self._serve_app.observe()
        log = await asyncio.to_thread(self._log)
        if observation.health is Health.ABSENT:
            return Observation(Health.STARTING, f"application {self._app} is not deployed", log)
        if observation.health is Health.BROKEN:
            return Observation(Health.STARTING, f"application {self._app} can't be deployed: {observation.detail}", log)
        return Observation(observation.health, observation.detail, log)

    def _holder(self) -> str | None:
        holder = cast(bytes | None, self._redis.hget(claims_key(APP), self._app))
        return holder.decode() if holder is not None else None

    def _log(self) -> str:
        offer = read_offers(self._redis).get(self._app)
        return offer.log_dir if offer else ""


def _reject_deployment():
    raise ControlError("an application of the deploy file can only be deployed by `serve deploy`")
