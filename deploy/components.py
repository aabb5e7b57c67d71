# pyright: basic
"""The parts of a run as components that the reconciler keeps up: learner, env workers, generation.

Ray appears here and in the services' `app.py` alone. Calls into Ray block, so they run in threads.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.serve import Application
from ray.serve.schema import ApplicationStatus
from redis import Redis

from deploy import names
from deploy.config import RunConfig
from deploy.learner_host import LOG, LearnerHost, ask_to_stop, read_status
from deploy.preparation import LOGS, generation_app
from deploy.serve_status import ServeStatus, replicas_of
from services.control.components import Health, Observation
from services.generation import app as generation_service
from services.generation.config import app_name
from services.keys import ENDING, RunKeys
from services.rollout import app as rollout_app
from services.rollout.config import WorkerSettings
from services.weights import app as weights_app
from services.weights.config import WeightsConfig

logger = logging.getLogger(__name__)

PING_S = 2.0
"""An actor that does not answer in time is taken to be starting; one that is dead says so at once."""
HUNG_S = 60.0
"""An env worker that has answered before and has not for so long is killed; Ray starts it again."""
NO_RETRY_EXIT_CODE = 2
"""The learner's way to say that it would fail in the same way again: it can't use its configuration or checkpoint."""
SERVES = (ApplicationStatus.RUNNING, ApplicationStatus.UNHEALTHY)
"""An application whose replicas may be counted."""


class LearnerHostActor:
    """A learner host somewhere in the cluster."""

    def __init__(self, run_id: str, redis_url: str, output_dir: Path, threads: int, standby: bool) -> None:
        self._run_id = run_id
        self._output_dir = output_dir
        self._host = LearnerHost(run_id, redis_url, output_dir, threads=threads, standby=standby)

    def start(self) -> None:
        """See `LearnerHost.start`."""
        self._host.start()

    def stop(self, grace_s: float) -> None:
        """End the learner, and remove its weights from shared memory: nobody is there any more who would read them."""
        from services.weights.transports import cleanup

        self._host.end(grace_s)
        cleanup(self._run_id, WeightsConfig(), self._output_dir)


class ManagedLearner:
    """The learner process, wherever its host is; started and replaced by the mesh."""

    name = "learner"

    def __init__(self, config: RunConfig, redis: Redis, redis_url: str) -> None:
        self._config = config
        self._redis = redis
        self._redis_url = redis_url
        self._run_id = config.exp_name
        self._actor_name = names.learner_host(self._run_id)
        self._told = ""
        """Incarnation whose death, and replacement by the standby, the reconciler has been told of."""

    async def ensure(self) -> None:
        """Start a learner, unless one is alive or the whole mesh is being shut down."""
        status = await asyncio.to_thread(read_status, self._redis, self._run_id)
        if not status.alive and not await asyncio.to_thread(self._redis.exists, ENDING):
            await asyncio.to_thread(self._start)

    def _start(self) -> None:
        train = self._config.actor_train
        gpus = train.num_processes if train.device == "cuda" else 0
        options = {"num_cpus": 0, "num_gpus": gpus, "max_concurrency": 2}
        actor = (
            ray.remote(LearnerHostActor)
            .options(
                name=self._actor_name, namespace=names.NAMESPACE, lifetime="detached", get_if_exists=True, **options
            )
            .remote(
                self._run_id,
                self._redis_url,
                self._config.output_dir.resolve(),
                train.num_threads,
                self._config.control.standby_learner,
            )
        )
        ray.get(actor.start.remote(), timeout=60.0)

    async def stop(self, *, now: bool) -> None:
        """Ask its host to end it."""
        await asyncio.to_thread(ask_to_stop, self._redis, self._run_id, now=now)

    async def observe(self) -> Observation:
        """What its host has told Redis."""
        status = await asyncio.to_thread(read_status, self._redis, self._run_id)
        if not status.started:
            return Observation(Health.ABSENT)
        if status.alive and status.died and status.died != self._told and not status.stopping:
            self._told = status.died
            return Observation(Health.DEAD, f"{status.died_how}; the standby has taken over", LOG, status.died)
        if status.alive:
            if await asyncio.to_thread(self._redis.exists, RunKeys(self._run_id).progress):
                return Observation(Health.READY, log=LOG)
            return Observation(Health.STARTING, "prepares version 0", LOG)
        if status.stopping:
            return Observation(Health.ABSENT, status.how_it_ended, LOG)
        if status.exit_code == 0:
            if await asyncio.to_thread(has_finished, self._redis, self._run_id):
                return Observation(Health.DONE, "has trained all steps", LOG)
            return Observation(Health.DEAD, "ended before the last step", LOG, status.incarnation)
        health = Health.BROKEN if status.exit_code == NO_RETRY_EXIT_CODE else Health.DEAD
        return Observation(health, status.how_it_ended, LOG, status.incarnation)

    async def forget(self) -> None:
        """Remove the host actor."""
        await asyncio.to_thread(kill_actor, self._actor_name)


def has_finished(redis: Redis, run_id: str) -> bool:
    """Whether a learner has said that all steps are trained and evaluated."""
    return redis.hget(RunKeys(run_id).record, "learner_phase") == b"finished"


class ExternalLearner:
    """A learner that a person attaches with `offbeat learner attach`; the mesh waits for it."""

    name = "learner"

    def __init__(self, config: RunConfig, redis: Redis) -> None:
        self._run_id = config.exp_name
        self._max_steps = config.max_steps
        self._redis = redis

    async def ensure(self) -> None:
        """Nothing: it comes when somebody attaches it."""

    async def stop(self, *, now: bool) -> None:
        """Nothing: it sees that the run is stopped. With `now`, what it still writes is refused from here on."""
        if now:
            await asyncio.to_thread(self._redis.incr, RunKeys(self._run_id).epoch)
            await asyncio.to_thread(self._redis.delete, RunKeys(self._run_id).lease)

    async def observe(self) -> Observation:
        """Whether somebody holds the learner's lease, or has finished."""
        if await asyncio.to_thread(has_finished, self._redis, self._run_id):
            return Observation(Health.DONE, "has trained all steps")
        if await asyncio.to_thread(self._redis.exists, RunKeys(self._run_id).lease):
            return Observation(Health.READY)
        return Observation(Health.ABSENT, f"waits for `offbeat learner attach {self._run_id}`")


class ServeApp:
    """A Serve application of the run's own; Serve replaces its dead replicas, we bring back the application."""

    def __init__(self, name: str, app: str, build: Callable[[], Application], status: ServeStatus) -> None:
        self.name = name
        self._app = app
        self._build = build
        self._status = status
        self._asked: int | None = None
        """Replicas that Serve was asked for last."""

    async def ensure(self) -> None:
        """Deploy the application."""
        await asyncio.to_thread(self._deploy)
        self._asked = None

    def _deploy(self) -> None:
        serve.run_many(
            [serve.RunTarget(self._build(), name=self._app, route_prefix=None, external_scaler_enabled=True)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    async def stop(self, *, now: bool) -> None:  # noqa: ARG002
        """Delete the application."""
        await asyncio.to_thread(serve.delete, self._app, _blocking=False)

    async def resize(self, num_replicas: int) -> None:
        """Have so many replicas of its one deployment; replicas that are there already are left alone."""
        app = (await self._status()).get(self._app)
        if num_replicas == self._asked or app is None or app.status not in SERVES:
            return
        try:
            name, there = await asyncio.to_thread(replicas_of, self._app)
            if num_replicas != there:
                logger.info("%s: %d replicas, wanted are %d", self._app, there, num_replicas)
                await asyncio.to_thread(set_num_replicas, self._app, name, num_replicas)
        except (RayError, LookupError) as error:  # an application of somebody else's that may not be scaled
            logger.error("%s does not get %d replicas: %s", self._app, num_replicas, _last_line(str(error)))
        self._asked = num_replicas

    async def observe(self) -> Observation:
        """What Serve's controller says."""
        app = (await self._status()).get(self._app)
        if app is None:
            return Observation(Health.ABSENT, log=LOGS)
        match app.status:
            case ApplicationStatus.RUNNING:
                return Observation(Health.READY, log=LOGS)
            case ApplicationStatus.DEPLOY_FAILED:
                # Serve has tried its constructor again and again by now: once more would not help.
                return Observation(Health.BROKEN, _last_line(app.message), LOGS)
            case ApplicationStatus.UNHEALTHY:
                return Observation(Health.STARTING, "a replica is being replaced", LOGS)
            case _:
                return Observation(Health.STARTING, app.status.value.lower(), LOGS)


def set_num_replicas(app: str, deployment: str, count: int) -> None:
    """Let Serve start or stop replicas; those that run already run on. (Deploying anew would replace them all.)"""
    from ray.serve._private.common import DeploymentID
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None
    controller = client._controller
    ray.get(controller.update_deployment_replicas.remote(DeploymentID(deployment, app), count), timeout=10.0)


def generation_component(config: RunConfig, redis_url: str, model: Path, status: ServeStatus) -> ServeApp:
    """The engines that sample."""

    def build() -> Application:
        return generation_service.build(
            config.exp_name,
            config.actor_infer,
            config.weights,
            model=model.resolve(),
            sequence_length=config.sequence_length,
            redis_url=redis_url,
            output_dir=config.output_dir.resolve(),
            seed=config.seed,
        )

    return ServeApp("generation", app_name(config.exp_name), build, status)


def broker_component(config: RunConfig, redis_url: str, status: ServeStatus) -> ServeApp:
    """The weight-sync broker."""

    def build() -> Application:
        return weights_app.build(
            config.exp_name, config.weights, redis_url=redis_url, output_dir=config.output_dir.resolve()
        )

    return ServeApp("weights", weights_app.app_name(config.exp_name), build, status)


class WorkerPool:
    """The env workers, actors that Ray itself starts again when their process dies."""

    name = "env-workers"

    def __init__(self, config: RunConfig, redis_url: str, model: Path) -> None:
        self._run_id = config.exp_name
        self._num_workers = config.rollout.num_workers
        self._answered: dict[str, float] = {}
        """Worker -> monotonic time of its last answer."""
        self._settings = WorkerSettings(
            run_id=config.exp_name,
            seed=config.seed,
            model_folder=model.resolve(),
            output_dir=config.output_dir.resolve(),
            redis_url=redis_url,
            sequence_length=config.sequence_length,
            custom_envs=config.custom_envs,
            train_env_manager=config.train_env_manager,
            val_env_manager=config.val_env_manager,
            rollout=config.rollout,
            generating_args=config.actor_infer.generating_args,
            generation_app=generation_app(config),
            request_timeout_s=config.actor_infer.request_timeout_s,
            worker_timeout_s=config.buffer.worker_timeout_s,
        )

    @property
    def _names(self) -> list[str]:
        return [rollout_app.worker_name(self._run_id, index) for index in range(self._num_workers)]

    async def resize(self, num_workers: int) -> None:
        """Want so many workers: missing ones are started by `ensure`; those beyond give back what they play, and end."""
        self._num_workers = num_workers
        for index in itertools.count(num_workers):
            actor = await asyncio.to_thread(find_actor, rollout_app.worker_name(self._run_id, index))
            if actor is None:
                return
            actor.stop.remote()

    async def ensure(self) -> None:
        """Start the workers that are missing."""
        for index in range(self._num_workers):
            await asyncio.to_thread(rollout_app.build, index, self._settings, namespace=names.NAMESPACE)

    async def stop(self, *, now: bool) -> None:
        """End all workers; with `now`, what they play is given back to the buffer when they are missed."""
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
        """Whether every worker answers."""
        seen = await asyncio.gather(*(self._observe_one(name) for name in self._names))
        for health in (Health.DEAD, Health.ABSENT, Health.STARTING):
            concerned = [each for each in seen if each.health is health]
            if concerned:
                some = f" ({len(concerned)} of {len(seen)})" if len(seen) > 1 else ""
                first = concerned[0]
                # Some are there: the pool is not absent but short of some, and `ensure` starts the others alone.
                return Observation(health, f"{first.detail}{some}", first.log, first.incident)
        return Observation(Health.READY)

    async def _observe_one(self, name: str) -> Observation:
        log = f"{LOGS}/{name}.log"
        actor = await asyncio.to_thread(find_actor, name)
        if actor is None:
            return Observation(Health.ABSENT, log=log)
        try:
            await asyncio.wait_for(asyncio.shield(_as_future(actor.alive.remote())), PING_S)
        except (TimeoutError, ActorUnavailableError):
            return await self._silent(name, actor, log)
        except RayActorError as error:
            return Observation(Health.DEAD, _last_line(str(error)), log, actor._actor_id.hex())
        self._answered[name] = time.monotonic()
        return Observation(Health.READY, log=log)

    async def _silent(self, name: str, actor: ActorHandle, log: str) -> Observation:
        """A worker that starts does not answer yet; one that has answered, and does not for long, hangs and is killed."""
        since = self._answered.get(name)
        if since is None:
            return Observation(Health.STARTING, "starts", log)
        silent_s = time.monotonic() - since
        if silent_s < HUNG_S:
            return Observation(Health.STARTING, f"has not answered for {silent_s:.0f} s", log)
        logger.error("%s has not answered for %.0f s and is killed", name, silent_s)
        del self._answered[name]
        # For good; `ensure` makes a new one. Killed for Ray to start again, one whose node had died was seen to stay away.
        await asyncio.to_thread(ray.kill, actor, no_restart=True)
        return Observation(Health.DEAD, f"hung for {silent_s:.0f} s", log, f"hung at {since}")


async def _as_future(reference: "ray.ObjectRef[Any]") -> Any:
    return await reference


def _last_line(text: str) -> str:
    """What a traceback comes down to."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was given"


def find_actor(name: str) -> ActorHandle | None:
    """Our named actor, or None."""
    try:
        return ray.get_actor(name, namespace=names.NAMESPACE)
    except ValueError:
        return None


def kill_actor(name: str) -> None:
    """End our named actor, if there is one."""
    actor = find_actor(name)
    if actor is not None:
        ray.kill(actor, no_restart=True)
