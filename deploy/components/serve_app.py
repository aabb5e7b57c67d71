# pyright: basic
import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.schema import ApplicationStatus

from offbeat.deploy.components.placement import place
from offbeat.deploy.components.ray_actors import last_line
from offbeat.deploy.components.serve_status import ServeStatus, count_replicas
from offbeat.deploy.config.device_roles import reward_role
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.sharing import with_utilization
from offbeat.deploy.run_setup import LOGS
from offbeat.services.control.interfaces import Health, Observation
from offbeat.services.generation import app as generation_service
from offbeat.services.generation.config import app_name
from offbeat.services.reward import app as reward_service
from offbeat.services.reward.client import app_name as reward_app_name
from offbeat.services.reward.config import AnyReward
from offbeat.services.weights import app as weights_app

logger = logging.getLogger(__name__)

SCALABLE_STATES = (ApplicationStatus.RUNNING, ApplicationStatus.UNHEALTHY)


class ServeApp:
    """Serve application; `ensure` redeploys it."""

    def __init__(self, name: str, app: str, build: Callable[[], Application], status: ServeStatus) -> None:
        self.name = name
        self._app = app
        self._build = build
        self._status = status
        self._requested_replicas: int | None = None

    async def ensure(self) -> None:
        await asyncio.to_thread(self._deploy)
        self._requested_replicas = None

    def _deploy(self) -> None:
        serve.run_many(
            [serve.RunTarget(self._build(), name=self._app, route_prefix=None, external_scaler_enabled=True)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    async def stop(self, *, now: bool) -> None:  # noqa: ARG002
        await asyncio.to_thread(serve.delete, self._app, _blocking=False)

    async def resize(self, num_replicas: int) -> None:
        """Set the number, keeping running replicas."""
        app = (await self._status()).get(self._app)
        if num_replicas == self._requested_replicas or app is None or app.status not in SCALABLE_STATES:
            return
        try:
            name, current = await asyncio.to_thread(count_replicas, self._app)
            if num_replicas != current:
                logger.info("%s: scaling from %d to %d replicas", self._app, current, num_replicas)
                await asyncio.to_thread(set_num_replicas, self._app, name, num_replicas)
        except (RayError, LookupError) as error:  # e.g. an application that may not be scaled
            logger.error("can't scale %s to %d replicas: %s", self._app, num_replicas, last_line(str(error)))
        self._requested_replicas = num_replicas

    async def observe(self) -> Observation:
        app = (await self._status()).get(self._app)
        if app is None:
            return Observation(Health.ABSENT, log=LOGS)
        match app.status:
            case ApplicationStatus.RUNNING:
                return Observation(Health.READY, log=LOGS)
            case ApplicationStatus.DEPLOY_FAILED:
                # Serve has already retried the constructor.
                return Observation(Health.BROKEN, last_line(app.message), LOGS)
            case ApplicationStatus.UNHEALTHY:
                return Observation(Health.STARTING, "a replica is being replaced", LOGS)
            case _:
                return Observation(Health.STARTING, app.status.value.lower(), LOGS)


def set_num_replicas(app: str, deployment: str, count: int) -> None:
    """Resize without redeployment, which would replace running replicas."""
    from ray.serve._private.common import DeploymentID  # noqa: PLC0415
    from ray.serve.context import _get_global_client  # noqa: PLC0415

    client = _get_global_client()
    assert client is not None
    controller = client._controller
    ray.get(controller.update_deployment_replicas.remote(DeploymentID(deployment, app), count), timeout=10.0)


def generation_component(config: RunConfig, redis_url: str, model: Path, status: ServeStatus, uid: str) -> ServeApp:

    def build() -> Application:
        plan = place(config)
        return generation_service.build(
            config.exp_name,
            with_utilization(config, plan),
            config.weights,
            model=model.resolve(),
            sequence_length=config.sequence_length,
            redis_url=redis_url,
            output_dir=config.output_dir.resolve(),
            seed=config.seed,
            environment=config.environment,
            uid=uid,
            slots=plan.engines,
        )

    return ServeApp("generation", app_name(config.exp_name), build, status)


def reward_components(config: RunConfig, status: ServeStatus) -> list[ServeApp]:
    """Return the applications of rewards with replicas."""

    def component(index: int, reward: AnyReward) -> ServeApp:
        def build() -> Application:
            return reward_service.build(
                reward,
                output_dir=config.output_dir.resolve(),
                environment=config.environment,
                slots=place(config).scorers.get(reward_role(index), ()),
            )

        return ServeApp(f"reward-{reward.name}", reward_app_name(config.exp_name, reward.name), build, status)

    return [component(index, reward) for index, reward in enumerate(config.rewards) if reward.num_replicas]


def broker_component(config: RunConfig, redis_url: str, status: ServeStatus, uid: str) -> ServeApp:

    def build() -> Application:
        return weights_app.build(
            config.exp_name, config.weights, redis_url=redis_url, output_dir=config.output_dir.resolve(), uid=uid
        )

    return ServeApp("weights", weights_app.app_name(config.exp_name), build, status)
