"""Late writes of a run that was deleted or created anew under its name are refused, whichever part they come from."""

from collections.abc import AsyncIterator
from typing import cast

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.buffer.admin import configure_buffer
from offbeat.services.buffer.worker_client import AsyncRolloutBuffer
from offbeat.services.control.run import RunSpec, RunState, UnknownRunError
from offbeat.services.control.store import RunStore
from offbeat.services.errors import ForeignRunError
from offbeat.services.keys import RunKeys
from offbeat.services.telemetry import MetricRecord, RedisMetrics
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.subscriber import RedisWeightSubscriber
from offbeat.trainer.learner.evaluations import RedisEvaluationLog
from offbeat.trainer.learner.reporter import RedisStatusBoard
from offbeat.trainer.run import FINISHED, ended_state
from tests.services.buffer.buffer_play import RUN, limits, publish, trajectory_for
from tests.services.control.control_fakes import SETTINGS

pytestmark = pytest.mark.slow

KEYS = RunKeys(RUN)
SPEC = RunSpec(RUN, "{}", "/tmp/run", 3, SETTINGS)
RESUMED = RunSpec(RUN, "{}", "/tmp/run", 3, SETTINGS, resume=True)


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[RunStore]:
    async with AsyncRedis.from_url(redis_url) as client:
        yield RunStore(client)


async def create(store: RunStore, redis: Redis, spec: RunSpec = SPEC) -> str:
    record, _ = await store.create(spec)
    configure_buffer(redis, RUN, limits(), record.uid)
    publish(redis, 0)
    return record.uid


async def end(store: RunStore, *, delete: bool = False) -> None:
    await store.update(RUN, state=RunState.FAILED)
    if delete:
        await store.delete(RUN)


def contents(redis: Redis) -> dict[bytes, object]:
    """The run's keys, with the fields of its hashes."""
    keys = cast(list[bytes], redis.keys(f"{KEYS.prefix}*"))
    return {key: redis.hgetall(key.decode()) if redis.type(key) == b"hash" else redis.type(key) for key in keys}


async def test_a_worker_of_an_earlier_run_fills_no_group_of_the_new_one(
    store: RunStore, redis: Redis, async_redis: AsyncRedis
):
    old = AsyncRolloutBuffer(async_redis, RUN, await create(store, redis))
    (task,) = await old.claim("w", 1)
    await end(store)
    new = AsyncRolloutBuffer(async_redis, RUN, await create(store, redis))
    (same,) = await new.claim("w", 1)
    assert (same.number, same.index) == (task.number, task.index)
    for call in (
        lambda: old.submit("w", task, trajectory_for(task, version=99)),
        lambda: old.claim("w", 1),
        lambda: old.heartbeat("w"),
        lambda: old.fail("w", task, "boom"),
        lambda: old.release("w"),
        lambda: old.task(0, "drawn"),
    ):
        with pytest.raises(ForeignRunError):
            await call()
    assert (await new.heartbeat("w")).cancelled == ()


async def test_a_worker_that_comes_to_a_deleted_run_brings_no_key_back(
    store: RunStore, redis: Redis, async_redis: AsyncRedis
):
    old = AsyncRolloutBuffer(async_redis, RUN, await create(store, redis))
    (task,) = await old.claim("w", 1)
    await end(store, delete=True)
    with pytest.raises(ForeignRunError):
        await old.submit("w", task, trajectory_for(task))
    with pytest.raises(ForeignRunError):
        await AsyncRolloutBuffer(async_redis, RUN, "old").claim("w", 1)
    assert redis.keys(f"{KEYS.prefix}*") == [KEYS.epoch.encode()]


@pytest.mark.parametrize("delete", [False, True], ids=["created anew", "deleted"])
async def test_late_reports_neither_change_nor_bring_back_a_run(
    store: RunStore, redis: Redis, async_redis: AsyncRedis, delete: bool, tmp_path: object
):
    uid = await create(store, redis)
    board, metrics = RedisStatusBoard(redis, RUN, uid), RedisMetrics(redis, RUN, uid)
    replica = RedisWeightSubscriber(async_redis, RUN, WeightsConfig(), cast("object", tmp_path), run_uid=uid)  # type: ignore[arg-type]
    board.show(learner_phase="training")
    assert redis.hget(KEYS.record, "learner_phase") == b"training"
    await end(store, delete=delete)
    if not delete:
        await create(store, redis)
    before = contents(redis)
    board.show(learner_phase=FINISHED)
    metrics.append(MetricRecord("learner", {}))
    RedisEvaluationLog(redis, RUN, uid).put("after-greedy-3", "recorded")
    await replica.report("replica", 99)
    assert contents(redis) == before
    if delete:
        with pytest.raises(UnknownRunError):
            await store.load(RUN)
        await create(store, redis)
    assert ended_state(redis, RUN) is None, "the old one's last word does not end the new run"


async def test_a_replaced_learners_status_is_dropped(store: RunStore, redis: Redis):
    board = RedisStatusBoard(redis, RUN, await create(store, redis))
    board.hold(int(redis.incr(KEYS.epoch)))  # type: ignore[arg-type]
    board.show(learner_phase="training")
    redis.incr(KEYS.epoch)
    board.show(learner_phase=FINISHED)
    assert redis.hget(KEYS.record, "learner_phase") == b"training"


async def test_resuming_keeps_the_runs_id_and_an_older_record_gets_one(store: RunStore, redis: Redis):
    uid = await create(store, redis)
    await end(store)
    assert await create(store, redis, RESUMED) == uid
    await end(store)
    redis.hdel(KEYS.record, "uid")
    redis.delete(KEYS.incarnation)
    upgraded = await create(store, redis, RESUMED)
    assert upgraded
    assert upgraded != uid
