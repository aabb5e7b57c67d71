"""A group whose members are compared with a greedy episode that is played beside them (ReMax)."""

import dataclasses

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.buffer.api import SubmitResult
from offbeat.services.buffer.scripts import BufferKeys
from tests.services.buffer.buffer_play import (
    RUN,
    Run,
    limits,
    publish,
)


@pytest.fixture
def run(redis: Redis, async_redis: AsyncRedis) -> Run:
    """Groups of two and a greedy one, and one to spare."""
    return Run.begin(redis, async_redis, limits(redundancy=1, baselines=1, max_attempts=1, max_groups_in_flight=1))


async def test_the_last_member_is_played_greedily_whatever_the_temperature_is(run: Run):
    run.redis.hset(BufferKeys(RUN).limits, "temperature", "0.7")
    tasks = await run.buffer.claim("w", 100)
    assert [(t.index, t.sampling_name, t.is_baseline) for t in tasks] == [
        (0, "train", False), (1, "train", False), (2, "train", False), (3, "greedy", True),
    ]  # fmt: skip
    assert [t.temperature for t in tasks] == [0.7, 0.7, 0.7, None]


async def test_a_group_needs_its_members_and_its_baseline_and_keeps_them_apart(run: Run):
    zero, one, two, greedy = await run.buffer.claim("w", 4)
    assert await run.submit(greedy) is SubmitResult.ACCEPTED
    assert await run.submit(two) is SubmitResult.ACCEPTED
    assert run.learner.take(0) is None
    assert await run.submit(zero) is SubmitResult.COMPLETED
    group = run.learner.take(0)
    assert group is not None
    assert [t.index for t in group.trajectories] == [0, 2]
    assert [t.index for t in group.baselines] == [3]
    assert (await run.buffer.heartbeat("w")).cancelled == (one,)
    assert run.learner.counters().in_flight == 1


async def test_unneeded_siblings_are_cancelled_before_the_baseline_ends(run: Run):
    zero, one, two, greedy = await run.buffer.claim("w", 4)
    await run.submit(zero)
    await run.submit(one)
    assert run.learner.take(0) is None
    (progress,) = await run.watch.groups(8)
    assert (progress.missing, progress.played, progress.queued) == (1, 1, 0)
    assert (await run.buffer.heartbeat("w")).cancelled == (two,)
    assert await run.submit(two) is SubmitResult.LATE
    assert await run.submit(greedy) is SubmitResult.COMPLETED
    group = run.learner.take(0)
    assert group is not None
    assert [t.index for t in group.trajectories] == [0, 1]
    assert run.keys_left("unit") == []
    assert run.keys_left("claims:") == []


async def test_a_spare_sibling_that_is_not_played_yet_leaves_the_queue(run: Run):
    for task in await run.buffer.claim("w", 2):
        await run.submit(task)
    assert run.learner.snapshot().queued_train == 1
    (greedy,) = await run.buffer.claim("w", 8)
    assert greedy.is_baseline


async def test_a_baseline_that_fails_for_good_fails_its_group(run: Run):
    *_, greedy = await run.buffer.claim("w", 4)
    await run.buffer.fail("w", greedy, "boom")
    counters = run.learner.counters()
    assert (counters.failed, counters.in_flight) == ({"boom": 1}, 0)


async def test_a_baseline_is_tried_again_as_one(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, limits(baselines=1, max_attempts=2, max_groups_in_flight=1))
    *_, greedy = await run.buffer.claim("w", 3)
    await run.buffer.fail("w", greedy, "boom")
    assert await run.buffer.claim("w", 8) == [dataclasses.replace(greedy, attempt=1)]


async def test_a_group_whose_baseline_is_too_old_expires(run: Run):
    zero, _, _, greedy = await run.buffer.claim("w", 4)
    await run.submit(greedy)
    assert zero.min_version == 0
    publish(run.redis, 2)
    await run.buffer.heartbeat("w")
    assert run.learner.counters().dropped == {"expired": 1}
