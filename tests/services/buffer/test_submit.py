import asyncio
from typing import Any

import numpy as np
import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.buffer.api import SubmitResult
from offbeat.services.errors import CodecError
from tests.copying import replace
from tests.services.buffer.buffer_play import (
    Run,
    limits,
    publish,
    trajectory_for,
)


async def test_a_group_enters_the_stream_when_its_last_member_comes(run: Run):
    first, second, *_ = await run.buffer.claim("w", 100)
    assert await run.submit(second) is SubmitResult.ACCEPTED
    assert run.learner.take(0) is None
    assert await run.submit(first) is SubmitResult.COMPLETED
    group = run.learner.take(0)
    assert group is not None
    assert (group.group_id, group.number, group.admitted_version) == ("run-0", 0, 0)
    assert (group.tag, group.seed) == ("lake", 1000)
    assert [t.index for t in group.trajectories] == [0, 1]
    assert run.keys_left("unit:t:0") == []


async def test_a_member_is_kept_once(run: Run):
    first, second, *_ = await run.buffer.claim("w", 100)
    await run.buffer.submit("w", first, trajectory_for(first, reward=1.0))
    again = trajectory_for(first, reward=5.0)
    assert await run.buffer.submit("w", first, again) is SubmitResult.DUPLICATE
    await run.submit(second)
    assert await run.buffer.submit("w", first, again) is SubmitResult.DUPLICATE
    group = run.learner.take(0)
    assert group is not None
    assert [t.reward for t in group.trajectories] == [1.0, 1.0]
    assert run.learner.counters().submitted == 1
    run.learner.ack([group.entry_id], 1)
    assert await run.buffer.submit("w", first, again) is SubmitResult.LATE


async def test_the_first_members_win_and_the_redundant_ones_are_cancelled(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, limits(redundancy=2, max_groups_in_flight=1))
    other = run.other_worker()
    zero, one, two = await run.buffer.claim("a", 3)
    (three,) = await other.claim("b", 1)
    assert await run.submit(three, "b") is SubmitResult.ACCEPTED
    other._forget("b", three)
    assert await run.submit(one, "a") is SubmitResult.COMPLETED
    orders = await run.buffer.heartbeat("a")
    assert set(orders.cancelled) == {zero, two}
    assert (await run.buffer.heartbeat("a")).cancelled == ()
    assert await run.submit(two, "a") is SubmitResult.LATE
    group = run.learner.take(0)
    assert group is not None
    assert [t.index for t in group.trajectories] == [1, 3]


async def test_redundant_members_that_are_not_played_leave_the_queue(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, limits(redundancy=2, max_groups_in_flight=1))
    zero, one = await run.buffer.claim("w", 2)
    assert run.learner.snapshot().queued_train == 2
    await run.submit(zero)
    await run.submit(one)
    assert run.learner.snapshot().queued_train == 0
    assert {t.number for t in await run.buffer.claim("w", 2)} == {1}


async def test_redundancy_makes_up_for_members_that_fail(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, limits(redundancy=1, max_attempts=1, max_groups_in_flight=1))
    zero, one, two = await run.buffer.claim("w", 3)
    await run.buffer.fail("w", zero, "boom")
    assert run.learner.counters().failed == {}
    assert await run.submit(zero) is SubmitResult.LATE
    await run.submit(one)
    assert await run.submit(two) is SubmitResult.COMPLETED


async def test_a_second_failure_beyond_redundancy_fails_the_group(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, limits(redundancy=1, max_attempts=1, max_groups_in_flight=1))
    zero, one, two = await run.buffer.claim("w", 3)
    await run.submit(two)
    await run.buffer.fail("w", zero, "boom")
    await run.buffer.fail("w", one, "bang")
    counters = run.learner.counters()
    assert (counters.failed, counters.in_flight) == ({"bang": 1}, 0)
    assert run.keys_left("blobs") == []


async def test_a_trajectory_that_breaks_the_schema_is_refused_before_it_is_sent(run: Run):
    task, *_ = await run.buffer.claim("w", 1)
    good = trajectory_for(task)
    broken = replace(good.segments[0], logprobs=np.full(12, np.nan, dtype=np.float32))
    with pytest.raises(CodecError, match="not finite"):
        await run.buffer.submit("w", task, replace(good, segments=(broken,)))
    assert await run.submit(task) is SubmitResult.ACCEPTED


async def test_a_reassigned_episode_is_accepted_from_the_first_to_finish(run: Run):
    task, *_ = await run.buffer.claim("slow", 1)
    other = run.other_worker()
    run.silence("slow")
    (again,) = await other.claim("quick", 1)
    assert (again.group_id, again.index, again.attempt) == (task.group_id, task.index, 1)
    assert await run.submit(task, "slow") is SubmitResult.ACCEPTED
    assert (await other.heartbeat("quick")).cancelled == (again,)
    assert await run.submit(again, "quick") is SubmitResult.DUPLICATE


async def test_a_submitted_episode_that_waited_for_a_retry_leaves_the_queue(run: Run):
    task, *_ = await run.buffer.claim("slow", 1)
    run.silence("slow")
    await run.other_worker().heartbeat("quick")
    assert run.learner.snapshot().queued_train == 2
    await run.submit(task, "slow")
    assert run.learner.snapshot().queued_train == 1


async def test_a_group_that_no_step_can_consume_within_the_bound_expires(run: Run, redis: Redis):
    tasks = await run.buffer.claim("w", 100)
    await run.submit(tasks[0])
    publish(redis, 1)
    await run.buffer.heartbeat("w")
    assert run.learner.counters().dropped == {}
    publish(redis, 2)
    orders = await run.buffer.heartbeat("w")
    assert set(orders.cancelled) == set(tasks[1:])
    counters = run.learner.counters()
    assert (counters.dropped, counters.in_flight) == ({"expired": 4}, 0)
    assert run.keys_left("unit") == run.keys_left("blobs") == []


async def test_a_group_whose_players_started_on_newer_weights_does_not_expire(run: Run, redis: Redis):
    (first,) = await run.buffer.claim("w", 1)
    await run.buffer.release("w")
    publish(redis, 2)
    tasks = await run.buffer.claim("w", 2)
    assert [(t.number, t.min_version) for t in tasks] == [(0, 2), (0, 2)]
    assert run.learner.counters().dropped == {}
    publish(redis, 3)
    assert (await run.buffer.heartbeat("w")).cancelled == ()
    for task in tasks:
        await run.submit(task)
    group = run.learner.take(0)
    assert group is not None
    assert (group.admitted_version, group.oldest_version, first.min_version) == (0, 2, 0)


async def test_nothing_expires_where_stale_groups_are_trained(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, limits(stale_policy="train"))
    await run.buffer.claim("w", 100)
    publish(redis, 9)
    assert (await run.buffer.heartbeat("w")).cancelled == ()
    assert run.learner.counters().dropped == {}


async def test_a_group_without_one_sampled_token_is_as_old_as_its_admission(run: Run):
    tasks = (await run.buffer.claim("w", 100))[:2]
    for task in tasks:
        full = trajectory_for(task)
        segment = full.segments[0]
        mute = replace(segment, loss_mask=np.zeros(12, np.bool_), logprobs=np.zeros(12, np.float32), versions=())
        await run.buffer.submit("w", task, replace(full, segments=(mute,), turns=()))
    group = run.learner.take(0)
    assert group is not None
    assert group.oldest_version == 0


async def test_an_episode_that_is_being_handed_in_is_not_called_off(run: Run, monkeypatch: pytest.MonkeyPatch):
    (task,) = await run.buffer.claim("w", 1)
    send, stored, released = run.buffer._run.call_merged, asyncio.Event(), asyncio.Event()

    async def slowly(*args: Any, **options: Any) -> Any:
        answer = await send(*args, **options)
        stored.set()
        await released.wait()
        return answer

    monkeypatch.setattr(run.buffer._run, "call_merged", slowly)
    submission = asyncio.create_task(run.submit(task))
    await stored.wait()
    assert (await run.buffer.heartbeat("w")).cancelled == ()
    released.set()
    assert await submission is SubmitResult.ACCEPTED
