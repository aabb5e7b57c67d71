"""Ray Serve application of the control service; imports validation and components by name."""

import asyncio
import json
import math
import pkgutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from offbeat.services.control.api import create_api
from offbeat.services.control.config import ControlTuning
from offbeat.services.control.reconciler import Reconciler
from offbeat.services.control.restart_policy import RestartPolicy
from offbeat.services.control.rights import NO_TOKENS, Tokens
from offbeat.services.control.service import ControlService
from offbeat.services.control.store import RunStore
from offbeat.services.errors import ControlError
from offbeat.services.process import freeze_started, uncollected_imports
from offbeat.services.redis.connection import connect_async
from offbeat.services.serve_proxy import refuse_other_hosts
from offbeat.services.telemetry import configure_logging

DEPLOYMENT = "control"


@dataclass(frozen=True, slots=True)
class ControlSettings:
    redis_url: str
    factory: str
    """`module:name`: (redis, redis_url, working_dir, max_cpus) -> `RunFactory` with `build_mesh` and `complete`."""
    tokens: Tokens = NO_TOKENS
    reconcile_s: float = 0.5
    log_dir: Path | None = None
    working_dir: Path | None = None
    """Base of relative paths; None: current folder."""
    mesh: str = ""
    """As in `RunRecord`."""
    max_cpus: float = 0.0
    """CPUs up to which an autoscaler adds nodes; 0: no autoscaler."""


class ControlDeployment:
    """Single replica with the API and the reconciler."""

    def __init__(self, settings: ControlSettings) -> None:
        configure_logging(DEPLOYMENT, settings.log_dir)
        self._settings = settings
        self._reconciler: Reconciler | None = None
        if not settings.tokens.grants:
            refuse_other_hosts(ControlError, "set token_file of the control application")

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Apply `ControlTuning`."""
        tuning = ControlTuning.model_validate_json(json.dumps(user_config))
        assert self._reconciler is not None
        policy = RestartPolicy(max_restarts=tuning.max_restarts, drain_timeout_s=tuning.drain_timeout_s)
        self._reconciler.tune(reconcile_s=tuning.reconcile_s, policy=policy)

    def __serve_build_asgi_app__(self) -> FastAPI:
        settings = self._settings
        redis = connect_async(settings.redis_url)
        with uncollected_imports():
            make = pkgutil.resolve_name(settings.factory)
        factory = make(redis, settings.redis_url, settings.working_dir, settings.max_cpus)
        store = RunStore(redis, orphaned_after_s=math.inf, mesh=settings.mesh)
        logs = str(settings.log_dir / f"{DEPLOYMENT}.log") if settings.log_dir else ""
        self._reconciler = reconciler = Reconciler(
            store,
            factory.build_mesh,
            reconcile_s=settings.reconcile_s,
            own_log=logs,
            write_report=factory.write_report,
            complete=factory.complete,
        )
        service = ControlService(store, factory, wake=reconciler.wake, redis_trouble=lambda: reconciler.redis_trouble)

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            task = asyncio.create_task(reconciler.run(), name="reconciler")
            freeze_started()
            try:
                yield
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await redis.aclose()

        return create_api(service, tokens=settings.tokens, lifespan=lifespan)


def build(settings: ControlSettings) -> Application:
    deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=1,
        max_ongoing_requests=256,
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=2.0,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress()(ControlDeployment))
    return deployment.bind(settings)
