# pyright: basic
"""Ray and Serve in a child process, which Ray may exit.

Invariant: Ray lives exactly as long as this process, which exits when its stdin closes.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.deploy.local.head_watch import HeadWatch
from offbeat.deploy.local.processes import terminate_descendants
from offbeat.services.process import JsonLines, claim_stdout

STATE, REASON = "state", "reason"
"""Fields of an answer."""
UP, RETRYING, CONTROL, DIED, FAILED = "up", "retrying", "control", "died", "failed"
"""The last two are final and have a reason."""
TIMEOUT_MESSAGE = "timed out during startup"
"""Ray's error after 30 s, too short on a busy machine."""
MAX_STARTS = 4
RETRY_INTERVAL_S = 1.0
CLEANUP_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class RaySettings:
    temp_dir: str
    """Short path, for Unix sockets."""
    num_cpus: int
    object_store_bytes: int
    host: str
    port: int
    namespace: str


@dataclass(frozen=True, slots=True)
class LocalControlArgs:
    """`ControlSettings` as JSON values."""

    redis_url: str
    factory: str
    control: dict[str, Any]
    """`ControlConfig`."""
    log_dir: str
    app: str
    mesh: str


def start_ray(settings: RaySettings) -> None:
    import ray
    from ray import serve

    ray.init(
        address="local",
        num_cpus=settings.num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        namespace=settings.namespace,
        object_store_memory=settings.object_store_bytes,
        _temp_dir=settings.temp_dir,
    )
    serve.start(proxy_location="HeadOnly", http_options={"host": settings.host, "port": settings.port})


def start_with_retries(start: Callable[[], None], on_retry: Callable[[], object]) -> None:
    """Start Ray; after a timeout, call `on_retry` and retry. Raises Ray's last error."""
    for number in range(1, MAX_STARTS + 1):
        try:
            start()
            return
        except Exception as error:  # Ray raises no class of its own
            if TIMEOUT_MESSAGE not in str(error) or number == MAX_STARTS:
                raise
            sys.stderr.write(f"start {number} of Ray: {error}\n")
            on_retry()


def _clean_up(watch: HeadWatch) -> None:
    import ray

    with watch.suspended():
        ray.shutdown()
        terminate_descendants(CLEANUP_GRACE_S)


def start_control(arguments: LocalControlArgs) -> None:
    from ray import serve
    from ray.exceptions import RayError

    from offbeat.services.control.app import ControlSettings, build
    from offbeat.services.control.config import ControlConfig

    config = ControlConfig.model_validate_json(json.dumps(arguments.control))
    settings = ControlSettings(
        redis_url=arguments.redis_url,
        factory=arguments.factory,
        tokens=config.to_tokens(),
        reconcile_s=config.reconcile_s,
        log_dir=Path(arguments.log_dir),
        mesh=arguments.mesh,
    )
    for number in range(1, MAX_STARTS + 1):
        try:
            serve.run(build(settings), name=arguments.app, route_prefix="/")
            return
        except RayError as error:  # Serve's controller was killed, and is back soon
            if number == MAX_STARTS:
                raise
            sys.stderr.write(f"start {number} of the control service: {error}\n")
            time.sleep(RETRY_INTERVAL_S)


def _exit(parent: JsonLines, state: str, reason: str) -> None:
    parent.send({STATE: state, REASON: reason})
    sys.stderr.flush()
    os._exit(1)


def serve_parent(parent: JsonLines) -> None:
    import ray

    settings = parent.receive()
    if settings is None:
        return
    watch = HeadWatch(lambda reason: _exit(parent, DIED, reason))
    watch.start()

    def on_retry() -> None:
        parent.send({STATE: RETRYING})
        _clean_up(watch)

    try:
        start_with_retries(lambda: start_ray(RaySettings(**settings)), on_retry)
        parent.send({STATE: UP})
        arguments = parent.receive()
        if arguments is not None:
            start_control(LocalControlArgs(**arguments))
            parent.send({STATE: CONTROL})
            parent.receive()
    except Exception as error:
        traceback.print_exc()
        _exit(parent, FAILED, f"{type(error).__name__}: {error}".splitlines()[0])
    watch.stop()
    ray.shutdown()


def main() -> None:
    # Serve imports pandas to encode its frames: a fifth of this process's imports, which delay the mesh
    sys.modules["pandas"] = None  # pyright: ignore[reportArgumentType]
    serve_parent(JsonLines(sys.stdin.buffer, claim_stdout()))


if __name__ == "__main__":
    main()
