"""`offbeat report`; writes only the report's files."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from redis import Redis
from redis.exceptions import RedisError

from offbeat.deploy.cli.audit import AuditError, find_folder
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.play.target import load_config
from offbeat.deploy.redis_address import find_url, has_other_run, resolve_url
from offbeat.deploy.report.history import RunHistory
from offbeat.deploy.report.report import ReportMaker, read_report
from offbeat.deploy.report.saved_history import read_history_file
from offbeat.deploy.run_folder import CONFIG
from offbeat.services.buffer.admin import snapshot_from
from offbeat.services.buffer.scripts import BufferScripts
from offbeat.services.control.schemas import CountersView
from offbeat.services.errors import MeshError
from offbeat.services.keys import RunKeys
from offbeat.services.redis.connection import connect
from offbeat.services.redis.server import EmbeddedRedis
from offbeat.services.telemetry import RedisMetrics

PAGE = 5000
REDIS_TIMEOUT_S = 3.0


def remake_report(run: str, redis_url: str | None = None) -> int:
    """Write and print a run's report; return the exit code. redis_url: overrides the folder's."""
    try:
        folder = find_folder(run)
        config = load_config(folder / CONFIG, needs_env=False).model_copy(update={"output_dir": folder})
        with _redis_of(folder, config, redis_url) as redis:
            history, counters = read_history(redis, config.exp_name, folder)
            ended_at = _ended_at(redis, config.exp_name)
        _write(config, history, counters, ended_at)
    except (AuditError, ConfigError, MeshError, RedisError, OSError) as error:
        print(f"offbeat: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _write(config: RunConfig, history: RunHistory, counters: CountersView, ended_at: float) -> None:
    folder = config.output_dir
    earlier = read_report(folder)  # of `offbeat train`, the only one with startup times
    began, last = history.attempts[-1] if history.attempts else (0.0, 0.0)
    if earlier.get("ended_at", 0.0) > began:
        ended_at = earlier["ended_at"]
    maker = ReportMaker(config, history)
    maker.timings = earlier.get("startup_s", {})
    maker.draw()
    maker.render()
    maker.write(counters, ended_at=ended_at or last)
    maker.show()


def read_history(redis: Redis, run_id: str, folder: Path) -> tuple[RunHistory, CountersView]:
    """Read metric records, of which Redis has the newest, and the buffer's counters; raises `MeshError` for an unknown
    run.
    """
    history = RunHistory()
    read_history_file(folder, history)
    counters = update_history(redis, run_id, history)
    if not history.attempts:  # only `offbeat train` records them
        history.attempts = _attempts(redis, run_id)
    return history, counters


def update_history(redis: Redis, run_id: str, history: RunHistory) -> CountersView:
    """Add newer records; return the buffer's counters. Raises `MeshError` for an unknown run."""
    if not redis.exists(RunKeys(run_id).record):
        raise MeshError(f"this Redis has no run {run_id!r}: set another one with --redis")
    metrics = RedisMetrics(redis, run_id)
    while page := list(metrics.read(history.position, count=PAGE)):
        history.add(page)
    return CountersView.of(snapshot_from(BufferScripts(redis, run_id)("snapshot")).counters)


def _attempts(redis: Redis, run_id: str) -> list[tuple[float, float]]:
    """Return (start, end) of attempts over REST, Unix times."""
    attempts: list[tuple[float, float]] = []
    entries = cast(list[tuple[bytes, dict[bytes, bytes]]], redis.xrange(RunKeys(run_id).history))
    for entry_id, fields in entries:
        time = int(entry_id.partition(b"-")[0]) / 1000
        if fields[b"e"] == b"created":
            attempts.append((time, time))
        elif attempts:
            attempts[-1] = (attempts[-1][0], time)
    if attempts:
        return attempts
    started_at = cast(bytes | None, redis.hget(RunKeys(run_id).record, "started_at"))  # the history is trimmed
    return [(float(started_at), _ended_at(redis, run_id))] if started_at else []


def _ended_at(redis: Redis, run_id: str) -> float:
    return float(cast(bytes | None, redis.hget(RunKeys(run_id).record, "ended_at")) or 0.0)


@contextmanager
def _redis_of(folder: Path, config: RunConfig, url: str | None) -> Iterator[Redis]:
    """Connect to `url`, the configured Redis, the running run's, or a new one on its folder."""
    url = resolve_url(url) or config.redis.url or find_url(folder)
    if url is not None:
        with connect(url, patience_s=REDIS_TIMEOUT_S) as redis:
            if has_other_run(redis, config.exp_name, folder):
                raise MeshError(
                    f"this Redis has another run {config.exp_name!r} than that of {folder}: its report stays"
                )
            yield redis
        return
    if not (folder / "redis").is_dir():
        raise MeshError(f"{folder} holds no redis/: name the Redis of its run with --redis")
    with EmbeddedRedis(folder / "redis", config.redis) as server, Redis.from_url(server.url) as redis:
        yield redis
