"""`offbeat report`: the report of a run, made again from its folder.

Invariant: what a run left is only read; a run that goes on is asked through its Redis.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.play.target import load_config
from offbeat.deploy.report.history import RunHistory
from offbeat.deploy.report.report import REPORT, ReportMaker
from offbeat.deploy.run_folder import CONFIG, read_endpoints
from offbeat.services.buffer.admin import snapshot_from
from offbeat.services.buffer.scripts import BufferScripts
from offbeat.services.control.schemas import CountersView
from offbeat.services.errors import MeshError
from offbeat.services.redis.server import EmbeddedRedis
from offbeat.services.telemetry import RedisMetrics

PAGE = 5000


def remake_report(folder: Path) -> int:
    """Make the report of the run in `folder` again and show it; returns the exit code."""
    folder = folder.resolve()
    try:
        config = load_config(folder / CONFIG).model_copy(update={"output_dir": folder})
        with _redis_of(folder, config) as redis:
            history, counters = read_history(redis, config.exp_name)
    except (ConfigError, MeshError, RedisError) as error:
        print(f"offbeat: {error}", file=sys.stderr)  # noqa: T201
        return 1
    first = _first_report(folder)
    maker = ReportMaker(config, history)
    maker.timings = first.get("startup_s", {})
    maker.make_artifacts()
    maker.write(counters, ended_at=first.get("ended_at", history.attempts[-1][1] if history.attempts else 0.0))
    maker.show()
    return 0


def read_history(redis: Redis, run_id: str) -> tuple[RunHistory, CountersView]:
    """All metric records of a run, and its ledger."""
    history = RunHistory()
    metrics = RedisMetrics(redis, run_id)
    while page := list(metrics.read(history.position, count=PAGE)):
        history.add(page)
    return history, CountersView.of(snapshot_from(BufferScripts(redis, run_id)("snapshot")).counters)


@contextmanager
def _redis_of(folder: Path, config: RunConfig) -> Iterator[Redis]:
    """The Redis that holds the run: an outside one, the one of the running run, or one started on its folder."""
    running = read_endpoints(folder)
    url = config.redis.url or (running.redis_url if running else None)
    if url is not None:
        with Redis.from_url(url) as redis:
            yield redis
        return
    if not (folder / "redis").is_dir():
        raise MeshError(
            f"{folder} holds no redis/, from which a report is made: the run was sent to a mesh, or never began"
        )
    with EmbeddedRedis(folder / "redis", config.redis) as server, Redis.from_url(server.url) as redis:
        yield redis


def _first_report(folder: Path) -> dict[str, Any]:
    """What only the run itself knew: when it ended, and how fast it started."""
    try:
        return json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
