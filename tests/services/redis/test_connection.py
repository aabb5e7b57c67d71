import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from offbeat.services.buffer.admin import release_all_workers
from offbeat.services.buffer.config import RedisConfig
from offbeat.services.buffer.worker_client import AsyncRolloutBuffer
from offbeat.services.errors import RetryableError
from offbeat.services.redis import connection
from offbeat.services.redis.connection import connect, connect_async, local_address
from offbeat.services.redis.server import EmbeddedRedis
from tests.services.buffer.buffer_play import RUN
from tests.services.weights.publishing import give_lease

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("signal_number", [signal.SIGSTOP, signal.SIGKILL])
async def test_clients_give_up_a_hung_or_absent_redis_at_their_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal_number: signal.Signals
):
    monkeypatch.setattr(connection, "SOCKET_TIMEOUT_S", 2.0)
    with EmbeddedRedis(tmp_path, RedisConfig()) as server:
        client, async_client = connect(server.url, patience_s=0.5), connect_async(server.url, patience_s=0.5)
        worker = AsyncRolloutBuffer(async_client, RUN)
        give_lease(client, RUN, 1)
        assert release_all_workers(client, RUN) == 0
        assert await worker.claim("w", 1) == []
        assert server.pid is not None
        os.kill(server.pid, signal_number)
        started = time.monotonic()
        with pytest.raises(RetryableError):
            release_all_workers(client, RUN)
        with pytest.raises(RetryableError):
            await worker.claim("w", 1)
        assert 0.9 < time.monotonic() - started < 15
        if signal_number is signal.SIGSTOP:
            os.kill(server.pid, signal.SIGCONT)
        else:
            server.restart()
        assert release_all_workers(client, RUN) == 0
        assert await worker.claim("w", 1) == []
        await async_client.aclose()
        client.close()


async def test_more_callers_than_connections_wait_for_one(redis_url: str):
    client = connect_async(redis_url, max_connections=2)
    await client.set("key", "value")
    assert await asyncio.gather(*(client.get("key") for _ in range(20))) == [b"value"] * 20
    await client.aclose()


async def test_who_is_called_off_while_it_sends_ends(redis_url: str):
    over = False

    async def beat() -> None:
        while not over:
            await client.hset("key", "field", "value")  # type: ignore[misc]

    client = connect_async(redis_url)
    await client.ping()  # type: ignore[misc]
    deaf: list[int] = []
    for rounds in range(1, 40):  # of the loop, so that it is called off in each of the states of a command
        beating = asyncio.create_task(beat())
        for _ in range(rounds):
            await asyncio.sleep(0)
        beating.cancel()
        await asyncio.wait([beating], timeout=30)
        if not beating.cancelled():
            deaf.append(rounds)
            break
    over = True
    await client.aclose()
    assert not deaf


def test_a_url_without_a_port_leads_to_the_same_address():
    """Not to loopback, at which other hosts would look for this one in vain."""
    with connect("redis://192.0.2.1") as short, connect("redis://192.0.2.1:6379") as whole:
        assert local_address(short) == local_address(whole)
