"""The embedded Redis is restarted when it dies or hangs."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from offbeat.deploy.config.loader import load_run
from offbeat.deploy.local.mesh import LocalMesh
from offbeat.services.redis.server import EmbeddedRedis
from tests.paths import QUICKSTART
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_redis_is_restarted_when_it_dies_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
):
    monkeypatch.setattr("offbeat.deploy.local.mesh.REDIS_PING_INTERVAL_S", 0.1)
    monkeypatch.setattr("offbeat.deploy.local.mesh.REDIS_HANG_TIMEOUT_S", 0.5)
    monkeypatch.setattr("offbeat.services.redis.server.STOP_TIMEOUT_S", 0.5)
    config = load_run(QUICKSTART)
    mesh = LocalMesh(config, started_at=time.time())
    server = EmbeddedRedis(tmp_path / "redis", config.redis)
    mesh._redis_thread.submit(server.start).result()
    mesh._server = server
    supervision = asyncio.create_task(mesh.supervise_redis())
    try:
        before = server.pid
        assert before is not None
        os.kill(before, number)
        await wait_until(lambda: server.pid not in (None, before) and server.answers())
    finally:
        supervision.cancel()
        await asyncio.gather(supervision, return_exceptions=True)
        server.stop()
