import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.buffer.admin import BufferWatch
from offbeat.services.buffer.api import Admission
from offbeat.services.buffer.scripts import BufferKeys
from tests.services.buffer.buffer_play import (
    RUN,
    Run,
    limits,
    publish,
)


async def test_the_watch_says_what_admission_waits_for(redis: Redis, async_redis: AsyncRedis):
    watch = BufferWatch(async_redis, RUN)

    async def admission() -> Admission:
        return (await watch.snapshot()).admission

    assert await admission() is Admission.NOT_CONFIGURED
    await watch.set_paused(True)
    assert await admission() is Admission.NOT_CONFIGURED
    run = Run.begin(redis, async_redis, limits(max_groups_in_flight=3, total_groups=5), step=-1)
    assert await admission() is Admission.PAUSED
    await watch.set_paused(False)
    assert await admission() is Admission.NO_WEIGHTS
    publish(redis, 0)
    assert await admission() is Admission.OPEN
    await run.buffer.claim("w", 6)
    assert await admission() is Admission.GROUPS_IN_FLIGHT
    await run.buffer.release("w")
    await run.complete_groups(4)
    assert await admission() is Admission.STALENESS_BOUND
    publish(redis, 1)
    await run.complete_groups(1)
    assert await admission() is Admission.ALL_ADMITTED


async def test_a_snapshot_counts_queues_and_what_the_learner_holds(run: Run):
    await run.complete_groups(2)
    assert run.learner.take(0) is not None
    await run.buffer.claim("w", 3)
    run.learner.start_eval("mid", 5, sampling_name="greedy", min_version=0)
    snapshot = await run.watch.snapshot()
    assert (snapshot.playing, snapshot.ready, snapshot.consumed) == (2, 1, 1)
    assert (snapshot.queued_train, snapshot.queued_eval) == (1, 5)
    assert (snapshot.step, snapshot.epoch) == (0, 1)
    assert [(w.worker_id, w.episodes) for w in snapshot.workers] == [("w", 3)]
    assert snapshot.workers[0].silent_s < 5
    assert snapshot.counters == await run.watch.counters()


async def test_the_only_worker_counts_as_silent_since_its_heartbeat(run: Run, redis: Redis):
    """The observed clock, which times workers out, stands still meanwhile."""
    await run.buffer.claim("w", 1)
    redis.hincrby(f"{BufferKeys(RUN).root}:ledger", "swept", -60_000)
    assert [worker.silent_s for worker in (await run.watch.snapshot()).workers] == [pytest.approx(60, abs=30)]


async def test_the_life_of_each_group_is_recorded(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, limits(max_attempts=1, max_groups_in_flight=1))
    await run.complete_groups(2)
    first, second = run.learner.take(0), run.learner.take(0)
    assert first is not None
    assert second is not None
    run.learner.drop(second, "stale")
    (task,) = await run.buffer.claim("w", 1)
    await run.buffer.fail("w", task, "boom")
    run.learner.ack([first.entry_id], 7)
    assert await run.watch.life() == [
        (0, "admitted", "0"),
        (0, "submitted", "0"),
        (1, "admitted", "0"),
        (1, "submitted", "0"),
        (1, "dropped", "stale"),
        (2, "admitted", "0"),
        (2, "failed", "boom"),
        (0, "trained", "7"),
    ]
    assert await run.watch.life(count=1) == [(0, "trained", "7")]
