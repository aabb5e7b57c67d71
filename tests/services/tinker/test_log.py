"""Command logs in a real Redis: each command once, in order, whoever repeats what."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from redis import Redis

from offbeat.services.errors import FencedError
from offbeat.services.redis.connection import connect, connect_async
from offbeat.services.tinker.config import TinkerConfig
from offbeat.services.tinker.errors import QueueFullError
from offbeat.services.tinker.log import CommandLog, Write
from offbeat.services.tinker.records import (
    ForwardBackwardCommand,
    Lora,
    ModelRecord,
    OptimStep,
    Result,
    Session,
    SharedPass,
    decode_command,
    request_id_of,
)
from offbeat.services.tinker.store import TinkerStore

MODEL, OWNER = "session:train:0", "owner"
CONFIG = TinkerConfig(max_queued_commands=4, max_queued_mib=1)


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    with connect(redis_url) as redis:
        yield redis


@pytest.fixture
def log(redis: Redis) -> CommandLog:
    log = CommandLog(redis, "test")
    log.take_over()
    return log


@pytest_asyncio.fixture
async def store(redis_url: str) -> AsyncIterator[TinkerStore]:
    redis = connect_async(redis_url)
    store = TinkerStore(redis, "test", CONFIG)
    record = ModelRecord(owner=OWNER, session_id="session", created_at=0.0, lora=Lora(rank=1, seed=2))
    await store.put(store.keys.models, MODEL, record)
    listening = asyncio.create_task(store.listen())
    yield store
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    await redis.aclose()


def result_of(number: int) -> Result:
    return Result.of_json({"number": number})


async def test_a_command_is_logged_and_committed_once(store: TinkerStore, log: CommandLog) -> None:
    for _ in range(2):
        await store.submit(MODEL, OWNER, 0, OptimStep(learning_rate=0.5))
    assert log.wait(0.01) == {MODEL}
    assert log.wait(0.01) == set()
    data = log.command(MODEL, 0)
    assert data is not None
    assert decode_command(data) == OptimStep(learning_rate=0.5)
    for number in range(2):
        log.commit(MODEL, OWNER, 0, result_of(number))
    assert await store.result(request_id_of(MODEL, 0)) == result_of(0)
    await store.submit(MODEL, OWNER, 0, OptimStep())
    assert log.poll() == set()
    assert log.logged(MODEL) == [0]
    log.truncate(MODEL, [0])
    await store.submit(MODEL, OWNER, 0, OptimStep())
    assert log.logged(MODEL) == []


async def test_a_later_chunk_waits_in_the_log(store: TinkerStore, log: CommandLog) -> None:
    await store.submit(MODEL, OWNER, 1, OptimStep())
    assert log.command(MODEL, 0) is None
    await store.submit(MODEL, OWNER, 0, OptimStep())
    assert log.command(MODEL, 0) is not None
    assert log.logged(MODEL) == [0, 1]


async def test_a_learner_with_a_successor_commits_nothing(store: TinkerStore, log: CommandLog, redis: Redis) -> None:
    await store.submit(MODEL, OWNER, 0, OptimStep())
    successor = CommandLog(redis, "test")
    successor.take_over()
    with pytest.raises(FencedError):
        log.commit(MODEL, OWNER, 0, result_of(1))
    assert await store.result(request_id_of(MODEL, 0)) is None
    successor.commit(MODEL, OWNER, 0, result_of(2))
    assert await store.result(request_id_of(MODEL, 0)) == result_of(2)


async def test_records_are_written_with_the_result(store: TinkerStore, log: CommandLog) -> None:
    sessions = {name: Session(owner=name, created_at=1.0) for name in ("a", "b")}
    writes = [Write.of(store.keys.sessions, name, session) for name, session in sessions.items()]
    await store.submit(MODEL, OWNER, 0, OptimStep())
    log.commit(MODEL, OWNER, 0, result_of(0), writes)
    assert await store.all(store.keys.sessions, Session) == sessions


async def test_a_client_with_too_much_queued_is_asked_to_wait(store: TinkerStore, log: CommandLog) -> None:
    """Room is made by commits. A single command may exceed an empty queue."""
    for seq_id in range(4):
        await store.submit(MODEL, OWNER, seq_id, OptimStep())
    with pytest.raises(QueueFullError, match="4 commands"):
        await store.submit(MODEL, OWNER, 4, OptimStep())
    for seq_id in range(4):
        log.commit(MODEL, OWNER, seq_id, result_of(seq_id))
    large = ForwardBackwardCommand(bytes(2 << 20))
    await store.submit(MODEL, OWNER, 4, large)
    with pytest.raises(QueueFullError, match="1 MiB"):
        await store.submit(MODEL, OWNER, 5, OptimStep())
    await store.submit("session:train:1", "another", 0, OptimStep())
    log.commit(MODEL, OWNER, 4, result_of(4))
    await store.submit(MODEL, OWNER, 5, OptimStep())


async def test_a_waiting_client_gets_the_result_or_is_asked_to_poll_again(store: TinkerStore, log: CommandLog) -> None:
    assert await store.wait_for_result(request_id_of(MODEL, 0), 0.05) is None
    await store.submit(MODEL, OWNER, 0, OptimStep())
    log.commit(MODEL, OWNER, 0, result_of(0))
    assert await store.wait_for_result(request_id_of(MODEL, 0), 5.0) == result_of(0)


async def test_a_record_is_put_once(store: TinkerStore) -> None:
    first, second = (Session(owner=owner, created_at=0.0) for owner in ("a", "b"))
    await store.put_once(store.keys.sessions, "s", first)
    await store.put_once(store.keys.sessions, "s", second)
    assert await store.find(store.keys.sessions, "s", Session) == first


async def test_a_shared_pass_is_kept_as_long_as_its_command(store: TinkerStore, log: CommandLog, redis: Redis) -> None:
    shared = SharedPass(before=[3, 1], after=[2])
    key = log.keys.shared_passes(MODEL)
    for seq_id in range(3):
        await store.submit(MODEL, OWNER, seq_id, ForwardBackwardCommand(b""))
        log.commit(MODEL, OWNER, seq_id, result_of(seq_id), [Write.of(key, str(seq_id), shared)])
    assert [log.shared_pass(MODEL, each) for each in (0, 3)] == [shared, None]
    log.truncate(MODEL, [0, 1])
    assert [log.shared_pass(MODEL, each) for each in range(3)] == [None, None, shared]
    assert log.close(MODEL)
    assert not redis.exists(key)
