# pyright: basic
"""Deployed generation application, only claimed and released."""

import asyncio
import time
from collections.abc import Sequence

from redis import Redis

from offbeat.deploy.components.app_claims import claim_app, read_claim, release_app
from offbeat.deploy.components.serve_app import ServeApp
from offbeat.deploy.components.serve_status import ServeStatus
from offbeat.services.control.interfaces import Health, Observation
from offbeat.services.errors import ControlError
from offbeat.services.generation.tenancy import read_offers
from offbeat.services.weights.replica_reports import read_reports


class SharedGeneration:
    name = "generation"

    def __init__(self, run_id: str, app: str, redis: Redis, status: ServeStatus) -> None:
        self._since = time.time()
        self._run_id = run_id
        self._app = app
        self._redis = redis
        self._serve_app = ServeApp(self.name, app, _reject_deployment, status)

    async def ensure(self) -> None:
        """Claim the application; raises `ControlError` if others leave no room."""
        await asyncio.to_thread(claim_app, self._redis, self._app, self._run_id)

    async def resize(self, num_replicas: int) -> None:
        """Do nothing; the deploy file sets it."""

    async def stop(self, *, now: bool) -> None:  # noqa: ARG002
        await asyncio.to_thread(release_app, self._redis, self._app, self._run_id)

    async def observe(self) -> Observation:
        """Return STARTING if missing or broken, BROKEN if its engines refuse the run's weights."""
        runs = await asyncio.to_thread(read_claim, self._redis, self._app)
        if self._run_id not in runs:
            return Observation(Health.ABSENT)
        observation = await self._serve_app.observe()
        log = await asyncio.to_thread(self._log)
        if observation.health is Health.ABSENT:
            return Observation(Health.STARTING, f"application {self._app} is not deployed", log)
        if observation.health is Health.BROKEN:
            return Observation(Health.STARTING, f"application {self._app} can't be deployed: {observation.detail}", log)
        if refusal := await asyncio.to_thread(self._find_refusal):
            return Observation(Health.BROKEN, f"application {self._app} refuses the run's weights: {refusal}", log)
        detail = self._describe(runs) + (f": {observation.detail}" if observation.detail else "")
        return Observation(observation.health, detail, log)

    def _describe(self, runs: Sequence[str]) -> str:
        others = [run_id for run_id in runs if run_id != self._run_id]
        return f"application {self._app}" + (f", with {', '.join(others)}" if others else "")

    def _find_refusal(self) -> str:
        """Return why a replica refuses the run's weights; empty if none does."""
        reports = read_reports(self._redis, self._run_id).values()
        refusals = [each.load.refused for each in reports if each.version < 0 and each.at > self._since]
        return next(filter(None, refusals), "")

    def _log(self) -> str:
        offer = read_offers(self._redis).get(self._app)
        return offer.log_dir if offer else ""


def _reject_deployment():
    raise ControlError("an application of the deploy file can only be deployed by `serve deploy`")
