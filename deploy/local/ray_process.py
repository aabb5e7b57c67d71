# pyright: basic
"""Ray and Serve of one command, in a child process: `python -m offbeat.deploy.local.ray_process`.

Ray may exit its process, and can't be interrupted while it starts, so it runs in a child that reads requests as JSON
lines on stdin and answers with lines on stdout.

Invariant: Ray lives exactly as long as this process, which exits when its stdin closes.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from offbeat.deploy.local.processes import end_descendants

UP, AGAIN, CONTROL = "up", "again", "control"
TOO_SLOW = "timed out during startup"
"""Ray's message for a raylet that was not up after 30 s, a fixed timeout that is too short on a busy machine."""
STARTS = 4
GRACE_S = 2.0
"""Time for a failed start to end its processes."""


@dataclass(frozen=True, slots=True)
class RaySettings:
    """Settings of Ray and Serve."""

    temp_dir: str
    """A short path: it contains Unix sockets."""
    num_cpus: int
    object_store_bytes: int
    host: str
    port: int
    namespace: str


@dataclass(frozen=True, slots=True)
class LocalControlArgs:
    """`offbeat.services.control.app.ControlSettings` as JSON values."""

    redis_url: str
    wiring: str
    token: str | None
    read_token: str | None
    reconcile_s: float
    log_dir: str
    app: str


def to_line(message: RaySettings | LocalControlArgs) -> bytes:
    """Encode a request."""
    return json.dumps(asdict(message)).encode() + b"\n"


def start_ray(settings: RaySettings) -> None:
    """Start Ray and Serve's HTTP proxy."""
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


def patiently(start: Callable[[], None], say: Callable[[str], None]) -> None:
    """Call `start` until Ray is up, ending leftovers of a start that timed out; sends `AGAIN` before each retry.

    Raises:
        Exception: Ray's own, of the last start, or of one that failed for another reason than a timeout.
    """
    for number in range(1, STARTS + 1):
        try:
            start()
            return
        except Exception as error:  # Ray raises no class of its own
            if TOO_SLOW not in str(error) or number == STARTS:
                raise
            sys.stderr.write(f"start {number} of Ray: {error}\n")
            say(AGAIN)
            _tidy()


def _tidy() -> None:
    import ray

    ray.shutdown()
    end_descendants(GRACE_S)


def start_control(arguments: LocalControlArgs) -> None:
    """Deploy the control service and wait until it answers."""
    from ray import serve

    from offbeat.services.control.app import ControlSettings, build

    settings = ControlSettings(
        redis_url=arguments.redis_url,
        wiring=arguments.wiring,
        token=arguments.token,
        read_token=arguments.read_token,
        reconcile_s=arguments.reconcile_s,
        log_dir=Path(arguments.log_dir),
    )
    serve.run(build(settings), name=arguments.app, route_prefix="/")


def serve_parent(requests: TextIO, answers: TextIO) -> None:
    """Serve requests of the parent until stdin closes."""
    import ray

    settings = RaySettings(**json.loads(requests.readline()))

    def say(word: str) -> None:
        print(word, file=answers, flush=True)

    patiently(lambda: start_ray(settings), say)
    say(UP)
    line = requests.readline()
    if line:
        start_control(LocalControlArgs(**json.loads(line)))
        say(CONTROL)
        requests.read()
    ray.shutdown()


def main() -> None:
    """Keep stdout for answers, and send what Ray prints to stderr, which is a log file."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve_parent(sys.stdin, answers)


if __name__ == "__main__":
    main()
