import asyncio
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from offbeat.services.buffer.config import RedisConfig
from offbeat.services.redis import connection
from offbeat.services.redis.connection import connect, connect_async
from offbeat.services.redis.server import EmbeddedRedis
from offbeat.services.telemetry import (
    AsyncRedisMetrics,
    MetricRecord,
    Partial,
    RedisMetrics,
    configure_logging,
    mean,
    merge_all,
)


def test_means_of_unequal_parts_merge_into_the_mean_of_all():
    merged = merge_all([{"reward": mean([1.0])}, {"reward": mean([0.0, 0.0, 0.0])}])
    assert merged["reward"].value == 0.25


def test_an_empty_part_changes_nothing():
    assert merge_all([{"reward": mean([])}, {"reward": mean([2.0, 4.0])}])["reward"].value == 3.0
    assert mean([]).value == 0.0


@pytest.mark.parametrize(("kind", "expected"), [("sum", 5.0), ("max", 4.0), ("min", 1.0), ("last", 4.0)])
def test_each_kind_merges_in_its_way(kind: str, expected: float):
    assert Partial(kind, 1.0).merge(Partial(kind, 4.0)).value == expected


def test_kinds_do_not_mix():
    with pytest.raises(ValueError, match="does not merge"):
        Partial("sum", 1.0).merge(Partial("mean", 1.0))


def test_records_are_read_in_order_from_where_one_stopped(redis_url: str):
    with Redis.from_url(redis_url) as redis:
        metrics = RedisMetrics(redis, "run")
        for step in range(3):
            metrics.append(MetricRecord("learner", {"loss": mean([step])}, step=step))
        read = list(metrics.read())
        assert [record.step for _, record in read] == [0, 1, 2]
        assert [record.step for _, record in metrics.read(read[1][0])] == [2]


async def test_a_record_whose_reply_is_lost_is_appended_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A server that is stopped for longer than a socket's time limit executes each repetition of a command."""
    monkeypatch.setattr(connection, "SOCKET_TIMEOUT_S", 0.3)
    with EmbeddedRedis(tmp_path, RedisConfig()) as server:
        client, async_client = connect(server.url), connect_async(server.url)
        metrics, async_metrics = RedisMetrics(client, "run"), AsyncRedisMetrics(async_client, "run")
        for step in range(3):
            for is_async in (False, True):
                if step == 1:
                    pause(server.pid, 1.0)
                record = MetricRecord("learner", {}, step=step)
                await async_metrics.append(record) if is_async else metrics.append(record)
        assert [record.step for _, record in metrics.read()] == [0, 0, 1, 1, 2, 2]
        await async_client.aclose()
        client.close()


def test_a_record_that_its_writer_repeats_after_an_error_is_appended_once(redis_url: str):
    record = MetricRecord("rollout", {}, time=1.0)
    with connect(redis_url) as client:
        metrics = RedisMetrics(client, "run")
        script = metrics._write._script

        def lose_reply(**arguments: Any) -> None:
            script(**arguments)
            raise ConnectionError

        metrics._write._script = lose_reply  # type: ignore[assignment]
        with pytest.raises(ConnectionError):
            metrics.append(record)
        metrics._write._script = script
        metrics.append(record)
        assert len(list(metrics.read())) == 1
        metrics.append(record)
        assert len(list(metrics.read())) == 2


async def test_records_appended_at_once_are_all_kept(redis_url: str):
    client = connect_async(redis_url)
    metrics = AsyncRedisMetrics(client, "run")
    await asyncio.gather(*(metrics.append(MetricRecord("rollout", {}, step=step)) for step in range(50)))
    assert sorted(record.step or 0 for _, record in await metrics.read()) == list(range(50))
    await client.aclose()


def pause(pid: int | None, seconds: float) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(seconds, os.kill, (pid, signal.SIGCONT)).start()


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_a_request_over_http_is_no_line_in_the_log(tmp_path: Path, level: int):
    """Engines by HTTP and rewards send one per turn and score: for weeks, into a file that nothing rotates."""
    root = logging.getLogger()
    handlers, root_level = root.handlers[:], root.level
    try:
        configure_logging("worker", tmp_path, level)
        own = threading.get_ident()  # other tests leave threads, which may log
        for handler in set(root.handlers) - set(handlers):
            handler.addFilter(lambda record: record.thread == own)
        with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200))) as client:
            assert client.get("http://engine/health").is_success
        logging.getLogger("offbeat").info("a line of ours")
    finally:
        for handler in set(root.handlers) - set(handlers):
            handler.close()
        root.handlers[:] = handlers
        root.setLevel(root_level)
    log = (tmp_path / "worker.log").read_text()
    assert log.count("\n") == 1
    assert "a line of ours" in log
