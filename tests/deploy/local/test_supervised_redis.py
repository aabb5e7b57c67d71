"""The embedded Redis of a mesh is restarted when it dies or hangs, from its first start on."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from offbeat.deploy.local.supervised_redis import SupervisedRedis
from offbeat.services.buffer.config import RedisConfig
from offbeat.services.errors import MeshError
from offbeat.services.redis.connection import connect_async
from offbeat.services.redis.server import server_binary
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

KILLED_ONCE = """#!/bin/sh
[ -e tried ] || {{ touch tried; kill -9 $$; }}
exec {server} "$@"
"""


@asynccontextmanager
async def supervised(redis: SupervisedRedis) -> "AsyncIterator[asyncio.Task[None]]":
    """Supervision that begins before the server."""
    supervision = asyncio.create_task(redis.supervise())
    try:
        await redis.start()
        yield supervision
    finally:
        supervision.cancel()
        await asyncio.gather(supervision, return_exceptions=True)
        redis.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_redis_is_restarted_when_it_dies_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
):
    monkeypatch.setattr("offbeat.deploy.local.supervised_redis.PING_INTERVAL_S", 0.1)
    monkeypatch.setattr("offbeat.deploy.local.supervised_redis.HANG_TIMEOUT_S", 0.5)
    monkeypatch.setattr("offbeat.services.redis.server.STOP_TIMEOUT_S", 0.5)
    redis = SupervisedRedis(tmp_path, RedisConfig())
    async with supervised(redis):
        url, before = redis.url, redis.pid
        assert before is not None
        os.kill(before, number)
        await wait_until(lambda: redis.pid not in (None, before))
        assert redis.url == url
        async with connect_async(url) as client:
            assert await client.ping()  # pyright: ignore[reportGeneralTypeIssues]


async def test_a_server_killed_while_it_starts_is_started_again(tmp_path: Path):
    binary = tmp_path / "redis-server"
    binary.write_text(KILLED_ONCE.format(server=server_binary(None)))
    binary.chmod(0o755)
    redis = SupervisedRedis(tmp_path / "redis", RedisConfig(server=binary))
    async with supervised(redis):
        assert (tmp_path / "redis" / "tried").exists()
        assert redis.pid is not None


async def test_a_server_that_can_not_be_restarted_ends_the_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offbeat.deploy.local.supervised_redis.RESTART_TIMEOUT_S", 0.0)
    binary = tmp_path / "redis-server"
    binary.symlink_to(server_binary(None))
    redis = SupervisedRedis(tmp_path / "redis", RedisConfig(server=binary))
    async with supervised(redis) as supervision:
        binary.unlink()
        assert redis.pid is not None
        os.kill(redis.pid, signal.SIGKILL)
        with pytest.raises(MeshError, match=r"died and can't be restarted: redis\.server: .* does not exist"):
            await asyncio.wait_for(supervision, 30)


async def test_a_disk_error_of_a_restart_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    redis = SupervisedRedis(tmp_path, RedisConfig())
    errors = [OSError("input/output error")]
    async with supervised(redis):
        before = redis.pid
        assert before is not None
        monkeypatch.setattr(
            "offbeat.services.redis.server.drop_torn_transactions", lambda _folder: errors and _raise(errors.pop())
        )
        os.kill(before, signal.SIGKILL)
        await wait_until(lambda: redis.pid not in (None, before))
    assert not errors


def _raise(error: Exception) -> None:
    raise error
