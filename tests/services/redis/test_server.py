import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis import exceptions as redis_errors
from redis.backoff import NoBackoff
from redis.retry import Retry

from offbeat.services.buffer.config import RedisConfig
from offbeat.services.errors import MeshError, RetryableError
from offbeat.services.process import free_port
from offbeat.services.redis.connection import connect, connect_async
from offbeat.services.redis.lease import LearnerLease
from offbeat.services.redis.server import EmbeddedRedis
from tests.paths import ROOT
from tests.services.buffer.buffer_play import RUN, Run, limits
from tests.waiting import wait_until_sync

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path / "redis", RedisConfig()) as running:
        yield running


def process_exists(pid: int) -> bool:
    """Zombies do not count: a container without an init does not reap them."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it is reaped between opening and reading
        return False


def test_it_answers_on_loopback_behind_its_password(server: EmbeddedRedis):
    with connect(server.url) as client:
        assert client.ping()
        assert client.config_get("bind") == {"bind": "127.0.0.1"}
        assert client.config_get("appendonly") == {"appendonly": "yes"}
        port = client.connection_pool.connection_kwargs["port"]
    with Redis(port=port, retry=Retry(NoBackoff(), 0)) as stranger, pytest.raises(redis_errors.AuthenticationError):
        stranger.ping()
    command = Path(f"/proc/{server.pid}/cmdline").read_bytes()
    assert server.url.split("@")[0].rpartition(":")[2].encode() not in command


def test_its_files_are_for_their_owner_alone(server: EmbeddedRedis, tmp_path: Path):
    with connect(server.url) as client:
        client.set("key", "value")
    files = [path for path in (tmp_path / "redis").rglob("*") if "appendonly" in path.name]
    assert files
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)


@pytest.mark.parametrize("password", ["", "secret"])
def test_the_next_server_is_found_where_the_last_one_was(tmp_path: Path, password: str):
    port = free_port()
    urls: list[str] = []
    for _ in range(2):
        with EmbeddedRedis(tmp_path / "redis", RedisConfig(), port=port, password=password) as server:
            urls.append(server.url)
            with Redis(port=port, password=password or None) as client:
                client.incr("starts")
                assert client.get("starts") == str(len(urls)).encode()
    assert urls == [urls[0]] * 2


def test_a_killed_server_comes_back_with_everything_it_answered_for(server: EmbeddedRedis):
    url, pid = server.url, server.pid
    assert pid is not None
    with connect(url) as client:
        client.set("key", "value")
        os.kill(pid, signal.SIGKILL)
        wait_until_sync(lambda: not server.is_alive())
        assert server.pid is None
        server.restart()
        assert server.url == url
        assert server.pid not in (None, pid)
        assert client.get("key") == b"value"


def test_a_folder_that_was_used_before_is_resumed(tmp_path: Path):
    for expected in (None, b"value"):
        with EmbeddedRedis(tmp_path, RedisConfig(appendfsync="always")) as server, connect(server.url) as client:
            assert client.get("key") == expected
            client.set("key", "value")


def test_stopping_leaves_no_process(tmp_path: Path):
    with EmbeddedRedis(tmp_path, RedisConfig()) as server:
        pid = server.pid
    assert pid is not None
    assert not process_exists(pid)
    assert not server.is_alive()
    server.stop()


def test_two_servers_never_share_a_folder(server: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offbeat.services.redis.server.LOCK_TIMEOUT_S", 0.1)
    with pytest.raises(MeshError, match="another redis-server uses"):
        EmbeddedRedis(tmp_path / "redis", RedisConfig()).start()
    assert server.is_alive()


def test_a_server_binary_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(MeshError, match=r"redis\.server: /nowhere/redis-server does not exist"):
        EmbeddedRedis(tmp_path, RedisConfig(server=Path("/nowhere/redis-server"))).start()


def test_a_server_that_ends_at_once_says_why(tmp_path: Path):
    (tmp_path / "appendonly.aof").write_text("*garbage")
    server = EmbeddedRedis(tmp_path, RedisConfig())
    with pytest.raises(MeshError, match="Bad file format reading the append only file"):
        server.start()
    assert not server.is_alive()


def test_a_file_that_a_crash_cut_short_is_loaded(tmp_path: Path):
    with EmbeddedRedis(tmp_path, RedisConfig()) as server, connect(server.url) as client:
        client.set("key", "value")
        client.set("last", "x" * 100)
    aof = tmp_path / "appendonly.aof"
    aof.write_bytes(aof.read_bytes()[:-20])
    with EmbeddedRedis(tmp_path, RedisConfig()) as server, connect(server.url) as client:
        assert (client.get("key"), client.get("last")) == (b"value", None)


@pytest.mark.parametrize("missing", [3, 20, 60])
def test_a_torn_transaction_is_cut_off_whole(tmp_path: Path, missing: int):
    """Else the second restart executes it, or loses what was written after the first."""
    with EmbeddedRedis(tmp_path, RedisConfig()) as server, connect(server.url) as client:
        client.eval("redis.call('INCR', 'whole') redis.call('INCR', 'whole')", 0)
        client.eval("redis.call('INCR', 'torn') redis.call('INCR', 'torn')", 0)
    aof = tmp_path / "appendonly.aof"
    aof.write_bytes(aof.read_bytes()[:-missing])
    for attempt in range(3):
        with EmbeddedRedis(tmp_path, RedisConfig()) as server, connect(server.url) as client:
            assert (client.get("whole"), client.get("torn")) == (b"2", None)
            assert client.get("after") == (str(attempt).encode() if attempt else None)
            client.incr("after")


def test_the_server_dies_with_the_process_that_started_it(tmp_path: Path):
    script = (
        "import sys, signal; from pathlib import Path; from offbeat.services.buffer.config import RedisConfig;"
        "from offbeat.services.redis.server import EmbeddedRedis;"
        f"server = EmbeddedRedis(Path({str(tmp_path)!r}), RedisConfig()).start();"
        "print(server.pid, flush=True); signal.pause()"
    )

    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert process_exists(pid)
        parent.kill()
    wait_until_sync(lambda: not process_exists(pid))
    with EmbeddedRedis(tmp_path, RedisConfig()) as successor:
        assert successor.is_alive()


async def test_a_run_continues_through_the_death_of_its_redis(tmp_path: Path):
    # With everysec, a server that is killed while the disk syncs for longer than a second loses acknowledged writes
    server = EmbeddedRedis(tmp_path, RedisConfig(appendfsync="always"))
    with server, connect(server.url) as client:
        async_client = connect_async(server.url)
        run = Run.begin(client, async_client, limits(worker_timeout_s=60))
        tasks = await run.buffer.claim("w", 8)
        for task in tasks[:3]:
            await run.submit(task)
        assert run.learner.take(0) is not None
        before = run.learner.snapshot()

        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        wait_until_sync(lambda: not server.is_alive())
        waiting = asyncio.create_task(run.submit(tasks[3]))
        await asyncio.to_thread(server.restart)
        assert (await waiting).value == "completed"
        assert (await run.buffer.heartbeat("w")).cancelled == ()
        after = run.learner.snapshot()
        assert (after.consumed, after.ready) == (before.consumed, 1)
        second = run.learner.take(0)
        assert second is not None
        assert second.number == 1
        again = run.next_learner()
        assert [g.number for g in (again.take(0), again.take(0)) if g] == [0, 1]
        await async_client.aclose()


def test_a_blocked_learner_wakes_when_its_redis_comes_back(server: EmbeddedRedis):
    with connect(server.url) as client:
        run = Run.begin(client, connect_async(server.url))
        outcome: list[object] = []
        thread = threading.Thread(target=lambda: outcome.append(run.learner.take(1.0)))
        thread.start()
        server.restart()
        thread.join(60)
        assert outcome == [None]


def test_a_lease_outlives_a_restart_of_redis(server: EmbeddedRedis):
    with connect(server.url) as client, LearnerLease(client, RUN, "me", 1.0) as lease:
        epoch = lease.acquire()
        server.restart()
        wait_until_sync(lambda: lease.held() and client.get("offbeat:{run}:lease") is not None)
        assert (lease.epoch, client.get("offbeat:{run}:epoch")) == (epoch, str(epoch).encode())


async def test_a_redis_that_stays_away_is_reported_as_retryable(tmp_path: Path):
    with EmbeddedRedis(tmp_path, RedisConfig()) as server:
        client, async_client = connect(server.url, patience_s=0.5), connect_async(server.url, patience_s=0.5)
        run = Run.begin(client, async_client)
    for call in (run.learner.counters, lambda: run.learner.take(0)):
        with pytest.raises(RetryableError, match="Redis does not answer"):
            call()
    with pytest.raises(RetryableError):
        await run.buffer.claim("w", 1)
    with pytest.raises(RetryableError):
        await run.buffer.wait_for_work("w", 1)
    await async_client.aclose()
    client.close()
