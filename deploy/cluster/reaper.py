# pyright: basic
"""Detached actor that stops env workers, scorers and learner hosts at Serve's shutdown.

Invariants: no process outlives `serve shutdown`; a control replica's death stops nothing; learners save a checkpoint
before Redis stops.
"""

import asyncio
import logging
import threading
import time
from contextlib import suppress

import ray
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_list
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve._private.storage.kv_store import SERVE_INTERNAL_KV_NAMESPACE

from offbeat.deploy.components import ray_names
from offbeat.deploy.components.ray_actors import list_actor_names
from offbeat.services.keys import ENDING
from offbeat.services.redis.connection import connect
from offbeat.services.telemetry import configure_logging

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
LEARNER_GRACE_S = 20.0
"""Time to end a step; a checkpoint's is added."""
STOP_LIMIT_S = 600.0
"""Limit of a learner's stop, checkpoint included."""
ENSURE_INTERVAL_S = 5.0
SHUTDOWN_KEY = b"serve-shutdown-in-progress"
SHUTDOWN_FLAG_TTL_S = 30
"""Time without learner starts."""


class Reaper:
    def __init__(self) -> None:
        configure_logging(ray_names.REAPER, None)
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def is_alive(self) -> bool:
        return not self._watching.done()

    async def _watch(self) -> None:
        await asyncio.to_thread(wait_for_shutdown)
        logger.info("Serve is shut down: stopping the remaining actors")
        remaining = [name for name in await asyncio.to_thread(list_actor_names) if name != ray_names.REAPER]
        await asyncio.gather(*(self._stop_actor(name) for name in remaining))
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    async def _stop_actor(self, name: str) -> None:
        try:
            actor = await asyncio.to_thread(ray.get_actor, name, namespace=ray_names.NAMESPACE)
        except ValueError:
            return
        if name.startswith(ray_names.LEARNER_HOST_PREFIX):
            try:
                async with asyncio.timeout(STOP_LIMIT_S):
                    await actor.stop.remote(LEARNER_GRACE_S)  # pyright: ignore[reportGeneralTypeIssues]
            except (RayError, TimeoutError) as error:
                logger.warning("%s did not stop gracefully and is killed: %r", name, error)
        ray.kill(actor, no_restart=True)


def wait_for_shutdown() -> None:
    while is_serve_running():
        time.sleep(CHECK_INTERVAL_S)


def stop_learners(redis_url: str) -> None:
    """Stop learners if Serve is shutting down."""
    if not is_serve_shutting_down():
        return
    with connect(redis_url, patience_s=1.0) as redis:
        redis.set(ENDING, "1", ex=SHUTDOWN_FLAG_TTL_S)
        hosts = [name for name in list_actor_names() if name.startswith(ray_names.LEARNER_HOST_PREFIX)]
        logger.info("Serve is shutting down: stopping %d learner(s) before Redis", len(hosts))
        stopping: list[ray.ObjectRef[None]] = []
        for name in hosts:
            with suppress(ValueError):  # it has already exited
                stopping.append(ray.get_actor(name, namespace=ray_names.NAMESPACE).stop.remote(LEARNER_GRACE_S))
        deadline = time.monotonic() + STOP_LIMIT_S
        while stopping and time.monotonic() < deadline:
            _, stopping = ray.wait(stopping, num_returns=len(stopping), timeout=SHUTDOWN_FLAG_TTL_S / 3)
            redis.set(ENDING, "1", ex=SHUTDOWN_FLAG_TTL_S)


def is_serve_shutting_down() -> bool:
    keys = _internal_kv_list(b"ray-serve-", namespace=SERVE_INTERNAL_KV_NAMESPACE)
    return any(key.endswith(SHUTDOWN_KEY) for key in keys)  # PREFIX + namespace of Serve's starter + SHUTDOWN_KEY


def is_serve_running() -> bool:
    """Return whether Serve's controller exists, even restarting."""
    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def ensure_reaper() -> None:
    threading.Thread(target=_ensure_reaper, name="reaper starter", daemon=True).start()


def _ensure_reaper() -> None:
    while True:
        try:
            start_reaper()
        except RayError as error:
            logger.warning("can't start the reaper: %s; retrying in %g s", error, ENSURE_INTERVAL_S)
        time.sleep(ENSURE_INTERVAL_S)


def start_reaper() -> None:
    ray.remote(Reaper).options(
        name=ray_names.REAPER,
        namespace=ray_names.NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
    ).remote()
