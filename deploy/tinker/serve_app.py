"""Tinker's API as a Ray Serve application: the replica answers and samples, and supervises its learner.

Invariant: acknowledged commands are in the mesh's Redis and states on disk, so that replica and learner may be killed.
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.run_folder import locked
from offbeat.services.errors import MeshError
from offbeat.services.process import freeze_started
from offbeat.services.redis.serve_app import HEAD_NODE
from offbeat.services.serve_proxy import refuse_other_hosts
from offbeat.services.telemetry import configure_logging

DEPLOYMENT = "tinker"
MAX_ONGOING_CALLS = 4096
"""Most of them wait for a result."""
STOP_TIMEOUT_S = 40.0
"""For the learner to save its models."""


@dataclass(frozen=True, slots=True)
class TinkerSettings:
    redis_url: str
    config: RunConfig


class TinkerDeployment:
    async def __init__(self, settings: TinkerSettings) -> None:
        from offbeat.deploy.tinker.open_service import open_service  # imports torch  # noqa: PLC0415
        from offbeat.deploy.tinker.setup import TinkerSetup  # noqa: PLC0415

        config = settings.config
        if config.tinker.keys_file is None:
            refuse_other_hosts(MeshError, "set tinker.keys_file of the tinker application")
        name = serve.get_replica_context().app_name
        setup = await asyncio.to_thread(TinkerSetup, config, name)
        configure_logging(name, setup.root / "logs")
        self._context = AsyncExitStack()
        self._context.enter_context(locked(config.output_dir))
        self._learner = setup.learner(settings.redis_url)
        self._supervisor = asyncio.create_task(self._learner.supervise())
        service = open_service(setup.service(settings.redis_url))
        opening = asyncio.create_task(self._context.enter_async_context(service))
        await asyncio.wait({opening, self._supervisor}, return_when=asyncio.FIRST_COMPLETED)
        if self._supervisor.done():  # the engine would wait for its weights for ever
            opening.cancel()
            await asyncio.wait({opening})
            self._supervisor.result()
        self._service = await opening
        freeze_started()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._service.app

    async def check_health(self) -> None:
        """Raise if Serve must replace the replica."""
        if self._supervisor.done():
            self._supervisor.result()
        await self._service.service.check()

    async def __del__(self) -> None:
        if "_supervisor" not in self.__dict__:
            return
        self._supervisor.cancel()
        await asyncio.to_thread(self._learner.stop)
        await self._context.aclose()


def build(settings: TinkerSettings) -> Application:
    """Return the application; its folder is exclusive, and it starts with the first call.

    The learner is the replica's child, and shares its GPUs.
    """
    infer, train = settings.config.actor_infer, settings.config.actor_train
    deployment = serve.deployment(
        name=DEPLOYMENT,
        autoscaling_config={"min_replicas": 0, "max_replicas": 1},
        max_ongoing_requests=MAX_ONGOING_CALLS,
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=STOP_TIMEOUT_S,
        ray_actor_options={
            "num_cpus": infer.cpus_per_replica,
            "num_gpus": infer.engine.world_size if infer.device == "cuda" else int(train.device == "cuda"),
            "resources": {HEAD_NODE: 0.001},
        },
    )(serve.ingress()(TinkerDeployment))
    return deployment.bind(settings)
