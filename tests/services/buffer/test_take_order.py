"""Order of admission: what it costs to know that no group with a lower number still plays."""

from typing import Any

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.buffer.scripts import BufferKeys
from tests.services.buffer.buffer_play import RUN, Run, limits


@pytest.mark.parametrize("num_playing", [20, 400])
async def test_taking_in_order_of_admission_does_not_list_the_groups_that_play(
    redis: Redis, async_redis: AsyncRedis, num_playing: int
) -> None:
    """With `max_staleness: 0`, or a fraction, all of them are of one version."""
    run = Run.begin(redis, async_redis, limits(groups_per_step=1000, max_groups_in_flight=1000, total_groups=1000))
    learner = run.next_learner("admission")
    tasks = await run.buffer.claim("w", 2 * num_playing)
    assert len(tasks) == 2 * num_playing
    for task in tasks[-2:]:
        await run.submit(task)
    assert learner.take(0) is None
    redis.config_resetstat()
    assert learner.take(0) is None
    commands: Any = redis.info("commandstats")
    assert not {"cmdstat_zrangebyscore", "cmdstat_zrange"} & set(commands)
    assert commands["cmdstat_zscore"]["calls"] < 5
    for task in tasks[:2]:
        await run.submit(task)
    assert [group.number for group in (learner.take(0), learner.take(0)) if group is not None] == [0]
    for task in tasks[2:-2]:
        await run.submit(task)
    taken = [group.number for _ in range(num_playing) if (group := learner.take(0, 16)) is not None]
    assert taken == list(range(1, num_playing))


async def test_the_order_of_admission_holds_for_groups_of_an_earlier_build(
    redis: Redis, async_redis: AsyncRedis
) -> None:
    """Its ledger does not say which number is the lowest."""
    run = Run.begin(redis, async_redis)
    learner = run.next_learner("admission")
    tasks = await run.buffer.claim("w", 6)
    for task in tasks[4:]:
        await run.submit(task)
    assert learner.take(0) is None
    redis.hdel(f"{BufferKeys(RUN).root}:ledger", "lowest")
    assert learner.take(0) is None
    for task in tasks[:4]:
        await run.submit(task)
    assert [group.number for _ in range(3) if (group := learner.take(0)) is not None] == [0, 1, 2]


async def test_one_call_passes_over_a_bounded_number_of_ended_groups(redis: Redis, async_redis: AsyncRedis) -> None:
    """A learner that never waits asks again after days, and Redis must not stand still for a million look-ups."""
    run = Run.begin(redis, async_redis)
    learner = run.next_learner("admission")
    redis.hset(f"{BufferKeys(RUN).root}:ledger", mapping={"lowest": 0, "next": 50_000})
    tasks = await run.buffer.claim("w", 4)
    for task in tasks[2:]:
        await run.submit(task)
    redis.config_resetstat()
    assert learner.take(0) is None
    commands: Any = redis.info("commandstats")
    assert commands["cmdstat_zscore"]["calls"] < 2_100
    for task in tasks[:2]:
        await run.submit(task)
    assert [group.number for _ in range(2) if (group := learner.take(0)) is not None] == [50_000, 50_001]
