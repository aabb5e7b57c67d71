"""A Redis that is there and refuses writes: waited out like one that does not answer, and nothing is lost."""

import asyncio
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from redis import Redis
from redis import exceptions as redis_errors

from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.buffer.worker_client import AsyncRolloutBuffer
from offbeat.services.errors import BufferError, RetryableError
from offbeat.services.keys import RunKeys
from offbeat.services.process import free_port
from offbeat.services.redis.connection import connect, connect_async
from offbeat.services.redis.errors import RedisReadOnlyError, complaint
from offbeat.services.retry import retry_until_answered
from tests.conftest import redis_server_binary
from tests.services.buffer.buffer_play import RUN
from tests.services.weights.publishing import give_lease
from tests.waiting import wait_until, wait_until_sync

pytestmark = pytest.mark.slow

Switch = Callable[[bool], None]
"""Lets a Redis refuse writes, or take them."""


def full_memory(redis: Redis) -> Switch:
    return lambda on: redis.config_set("maxmemory", "1" if on else "0")


def no_replicas(redis: Redis) -> Switch:
    return lambda on: redis.config_set("min-replicas-to-write", "1" if on else "0")


def demoted(redis: Redis) -> Switch:
    return lambda on: redis.replicaof("127.0.0.1", "1") if on else redis.replicaof("NO", "ONE")


KINDS = {"OOM": full_memory, "NOREPLICAS": no_replicas, "READONLY": demoted}


@pytest.fixture(params=KINDS)
def refusing(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Switch]:
    """Of each way in which a Redis refuses writes."""
    with Redis.from_url(redis_url) as redis:
        switch = KINDS[request.param](redis)
        yield switch
        switch(False)


@pytest.fixture
def full(redis_url: str) -> Iterator[Switch]:
    with Redis.from_url(redis_url) as redis:
        switch = full_memory(redis)
        yield switch
        switch(False)


@contextmanager
def soon(act: Callable[[], object]) -> Iterator[None]:
    """Do something while the block is under way."""
    timer = threading.Timer(0.3, act)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def test_a_refused_command_is_retryable_and_explains_the_remedy(redis_url: str, refusing: Switch) -> None:
    with connect(redis_url, patience_s=0.1) as client:
        give_lease(client, RUN, 1)
        refusing(True)
        for write in (
            lambda: client.set("key", "value"),
            lambda: client.eval("redis.call('GET', 'key') return redis.call('SET', 'key', 'value')", 0),
            lambda: client.pipeline().set("key", "value").execute(),
            lambda: client.pipeline(transaction=False).get("key").set("key", "value").execute(raise_on_error=False),
        ):
            with pytest.raises(RedisReadOnlyError, match=r"^Redis refuses writes: [A-Z]+ .*\(.+\)$") as refused:
                write()
            assert complaint(refused.value) == str(refused.value)
        with pytest.raises(RetryableError, match=r"^Redis refuses writes: "):
            RedisLearnerBuffer(client, RUN, 1).teach("state")
        assert client.get("key") is None


def test_commands_wait_for_the_end_of_a_long_script(redis_url: str) -> None:
    """Redis answers BUSY to all others once a script has run for `lua-time-limit`."""
    script = "local s = redis.call('TIME')[1] while redis.call('TIME')[1] - s < 3 do end return 1"
    with connect(redis_url, patience_s=30.0) as client, Redis.from_url(redis_url) as other:
        other.config_set("lua-time-limit", "50")
        was_busy = threading.Event()

        def run_until_busy() -> None:
            while not was_busy.is_set():
                other.eval(script, 0)

        running = threading.Thread(target=run_until_busy)
        running.start()
        try:
            with connect(redis_url, patience_s=0.1) as impatient:
                wait_until_sync(lambda: _is_busy(impatient))
            was_busy.set()
            assert client.set("key", "value")
        finally:
            was_busy.set()
            running.join()
            other.config_set("lua-time-limit", "5000")


def _is_busy(client: Redis) -> bool:
    try:
        client.get("key")
    except RedisReadOnlyError as error:
        return "BUSY" in str(error)
    return False


@pytest.mark.usefixtures("run")
async def test_worker_and_learner_commands_succeed_once_redis_is_writable(redis_url: str, refusing: Switch) -> None:
    refusing(True)
    client = connect_async(redis_url, patience_s=20.0)
    worker = AsyncRolloutBuffer(client, RUN)
    with soon(lambda: refusing(False)):
        tasks = await worker.claim("w", 2)
    assert len(tasks) == 2
    await client.set(RunKeys(RUN).epoch, 1)
    refusing(True)
    with connect(redis_url, patience_s=20.0) as sync, soon(lambda: refusing(False)):
        RedisLearnerBuffer(sync, RUN, 1).teach("state")
    await client.aclose()


@pytest.mark.usefixtures("run")
async def test_pipelined_calls_fail_and_retry_individually(redis_url: str, refusing: Switch) -> None:
    refusing(True)
    client = connect_async(redis_url, patience_s=0.05)
    worker = AsyncRolloutBuffer(client, RUN)
    results = await asyncio.gather(*(worker.heartbeat("w") for _ in range(5)), return_exceptions=True)
    assert [type(each) for each in results] == [RetryableError] * 5
    calls = [asyncio.create_task(retry_until_answered(lambda: worker.claim("w", 1))) for _ in range(3)]
    await asyncio.sleep(0)
    refusing(False)
    assert all(len(tasks) == 1 for tasks in await asyncio.gather(*calls))
    await client.aclose()


def test_a_refusal_leaves_the_connection_and_other_errors_are_no_refusals(redis_url: str, full: Switch) -> None:
    with connect(redis_url, patience_s=0.1) as client:
        before = client.client_id()
        full(True)
        with pytest.raises(RedisReadOnlyError):
            client.set("key", "value")
        assert client.client_id() == before
        full(False)
        client.set("text", "OOM command not allowed: READONLY You can't write")
        with pytest.raises(redis_errors.ResponseError, match="WRONGTYPE"):
            client.hset("text", "a", "b")
        with pytest.raises(redis_errors.NoScriptError):
            client.evalsha("0" * 40, 0)
        give_lease(client, RUN, 1)
        with pytest.raises(BufferError, match="nothing"):
            RedisLearnerBuffer(client, RUN, 0).eval_result("nothing")


def test_data_of_another_server_are_used_only_once_redis_takes_the_mark(redis_url: str, refusing: Switch) -> None:
    with Redis.from_url(redis_url) as raw:
        give_lease(raw, RUN, 1)
        refusing(True)
        with (
            connect(redis_url, patience_s=0.1, run_id=RUN) as client,
            pytest.raises(RedisReadOnlyError, match=r"^Redis refuses writes: [A-Z]+ .*\(.+\)$"),
        ):
            client.ping()
        with connect(redis_url, patience_s=20.0, run_id=RUN) as client, soon(lambda: refusing(False)):
            assert client.get(RunKeys(RUN).incarnation) == b"/1/server/nonce?"


async def test_asynchronous_connections_wait_for_the_mark_too(redis_url: str, refusing: Switch) -> None:
    with Redis.from_url(redis_url) as raw:
        give_lease(raw, RUN, 1)
    refusing(True)
    hasty = connect_async(redis_url, patience_s=0.1, run_id=RUN)
    with pytest.raises(RetryableError, match=r"^Redis refuses writes: "):
        await AsyncRolloutBuffer(hasty, RUN).claim("w", 1)
    await hasty.aclose()
    client = connect_async(redis_url, patience_s=20.0, run_id=RUN)
    with soon(lambda: refusing(False)):
        assert await client.get(RunKeys(RUN).incarnation) == b"/1/server/nonce?"
    await client.aclose()


async def test_a_transaction_that_is_refused_is_not_repeated_without_its_watch(
    redis_url: str, refusing: Switch
) -> None:
    client = connect_async(redis_url, patience_s=20.0)
    async with client.pipeline() as pipe:
        await pipe.watch("key")
        refusing(True)
        pipe.multi()
        pipe.set("key", "mine")
        began = time.monotonic()
        with pytest.raises(RedisReadOnlyError, match=r"^Redis refuses writes: [A-Z]+ [^(]*\([^(]+\)$"):
            await pipe.execute()
        assert time.monotonic() - began < 10.0
    await client.aclose()


async def test_a_blocking_read_survives_the_demotion_of_its_redis(redis_url: str) -> None:
    client = connect_async(redis_url, patience_s=20.0)
    with Redis.from_url(redis_url) as other:
        demote = demoted(other)

        def waits() -> bool:
            return cast(dict[str, int], other.info("clients"))["blocked_clients"] == 1

        reading = asyncio.ensure_future(cast(Any, client.xread({"stream": "0"}, block=10_000)))
        await wait_until(waits)
        demote(True)
        demote(False)
        await wait_until(waits)
        other.xadd("stream", {"a": "b"})
        assert await reading
    await client.aclose()


def test_a_client_may_retry_beyond_its_timeout_until_stopped(redis_url: str, full: Switch) -> None:
    asked: list[str] = []

    def should_retry(error: Exception) -> bool:
        asked.append(str(error))
        if len(asked) == 3:
            full(False)
        return True

    full(True)
    with connect(redis_url, patience_s=0.05, should_retry=should_retry) as client:
        assert client.set("key", "value")
        assert len(asked) >= 3
        full(True)
        with (
            connect(redis_url, patience_s=0.05, should_retry=lambda _: False) as other,
            pytest.raises(RedisReadOnlyError),
        ):
            other.set("key", "value")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """URL of a redis-server whose append-only file is on a disk of a megabyte, and that disk as it is seen from here."""
    disk = tmp_path / "disk"
    disk.mkdir()
    port = free_port()
    mount = f"mount -t tmpfs -o size=1m tmpfs {disk} && exec {redis_server_binary()} --port {port} --bind 127.0.0.1"
    server = f"{mount} --dir {disk} --save '' --appendonly yes --appendfsync everysec --logfile {tmp_path}/log"
    spaces = ["unshare", "--mount"] if shutil.which("unshare") else []
    command = [*spaces, "sh", "-c", server]
    trial = [*spaces, "sh", "-c", f"mount -t tmpfs tmpfs {disk}"]
    if not spaces or subprocess.run(trial, capture_output=True, check=False).returncode:
        pytest.skip("this platform does not allow mounting a tmpfs")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{port}/0"

    def answers() -> bool:
        try:
            with Redis.from_url(url) as client:
                return bool(client.ping())
        except redis_errors.ConnectionError:
            return False

    try:
        wait_until_sync(answers)
        yield url, Path(f"/proc/{process.pid}/root{disk}")
    finally:
        process.terminate()
        process.wait(timeout=10)


def test_a_full_disk_is_waited_out_and_what_was_written_before_is_kept(small_disk: tuple[str, Path]) -> None:
    url, disk = small_disk
    ballast = disk / "ballast"
    with connect(url, patience_s=0.2) as client, Redis.from_url(url) as raw:
        client.set("before", "kept")
        give_lease(client, RUN, 1)
        ballast.write_bytes(b"\0" * (900 * 1024))

        def refused() -> bool:
            try:
                return not raw.rpush("filler", b"x" * 20_000)
            except redis_errors.ResponseError as error:
                return str(error).startswith("MISCONF")

        wait_until_sync(refused)
        with pytest.raises(RedisReadOnlyError, match=r"^Redis refuses writes: MISCONF .*No space left.*make room"):
            client.set("after", "refused")
        with pytest.raises(RetryableError, match=r"^Redis refuses writes: MISCONF"):
            RedisLearnerBuffer(client, RUN, 1).teach("state")
        assert client.get("before") == b"kept"
        ballast.unlink()
        with connect(url, patience_s=30.0) as patient:
            RedisLearnerBuffer(patient, RUN, 1).teach("state")
            assert patient.set("after", "taken")
