import asyncio

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.buffer.api import ClaimLimits
from offbeat.services.errors import BufferError, ReconcileError
from offbeat.services.messages.types import EpisodeKind
from tests.services.buffer.buffer_play import (
    Run,
    limits,
    publish,
    trajectory_for,
)


@pytest.mark.parametrize(("max_staleness", "num_ahead"), [(0.0, 0), (0.5, 2)])
async def test_groups_ahead_replace_those_without_signal_at_once(
    redis: Redis, async_redis: AsyncRedis, max_staleness: float, num_ahead: int
):
    """A fraction of the bound is ROLL's oversampling; what a batch does not need is in the next one."""
    run = Run.begin(redis, async_redis, limits(groups_per_step=4, max_staleness=max_staleness))
    tasks = await run.buffer.claim("w", 100)
    assert len(tasks) == 2 * (4 + num_ahead)
    for task in tasks:
        await run.submit(task)
    batch = [group for _ in range(4) if (group := run.learner.take(0))]
    for group in batch[:2]:
        run.learner.drop(group, "no_signal")
    replacements = [run.learner.take(0), run.learner.take(0)]
    assert [group is not None for group in replacements] == [num_ahead > 0] * 2
    assert len(await run.buffer.claim("w", 100)) == 2 * 2, "their places are taken at once"


async def test_nothing_is_admitted_before_the_first_weights(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, step=-1)
    assert await run.buffer.claim("w", 10) == []
    publish(redis, 0)
    assert len(await run.buffer.claim("w", 1)) == 1


async def test_an_unconfigured_run_hands_out_nothing(async_redis: AsyncRedis, redis: Redis):
    run = Run(redis, async_redis, *[None] * 3)  # type: ignore[arg-type]
    with pytest.raises(ReconcileError):
        await run.other_worker().claim("w", 5)
    with pytest.raises(ReconcileError):
        await run.other_worker().heartbeat("w")
    assert redis.keys("*") == []


@pytest.mark.parametrize(
    ("max_staleness", "step", "admitted"),
    [(0.0, 0, 2), (0.0, 3, 8), (0.5, 0, 3), (1.0, 0, 4), (1.0, 1, 6), (2.0, 0, 6)],
)
async def test_admission_stops_at_the_staleness_bound(
    redis: Redis, async_redis: AsyncRedis, max_staleness: float, step: int, admitted: int
):
    run = Run.begin(redis, async_redis, limits(max_staleness=max_staleness), step=step)
    tasks = await run.buffer.claim("w", 100)
    assert [(t.number, t.index) for t in tasks] == [(n, i) for n in range(admitted) for i in range(2)]
    assert {t.min_version for t in tasks} == {step}
    assert run.learner.counters().admitted == admitted


async def test_admission_never_goes_past_the_groups_that_the_run_needs(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, limits(total_groups=3, max_staleness=9.0))
    assert len(await run.buffer.claim("w", 100)) == 6


async def test_no_more_groups_are_played_than_max_groups_in_flight(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, limits(max_groups_in_flight=2))
    tasks = await run.buffer.claim("w", 100)
    assert len(tasks) == 4
    await run.submit(tasks[0])
    assert await run.buffer.claim("w", 100) == []
    await run.submit(tasks[1])
    assert {t.number for t in await run.buffer.claim("w", 100)} == {2}


async def test_a_dropped_and_a_failed_group_are_made_up_for(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, limits(max_staleness=0.0, max_attempts=1))
    first, second, third, _ = await run.buffer.claim("w", 100)
    await run.submit(first)
    await run.submit(second)
    assert await run.buffer.claim("w", 100) == []
    group = run.learner.take(0)
    assert group is not None
    run.learner.drop(group, "stale")
    assert {t.number for t in await run.buffer.claim("w", 100)} == {2}
    await run.buffer.fail("w", third, "step_timeout")
    assert {t.number for t in await run.buffer.claim("w", 100)} == {3}
    counters = run.learner.counters()
    assert (counters.admitted, counters.dropped, counters.failed) == (4, {"stale": 1}, {"step_timeout": 1})
    assert counters.in_flight == 2


async def test_acknowledging_groups_opens_no_admission_but_publishing_does(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, limits(max_staleness=0.0))
    await run.complete_groups(2)
    groups = [run.learner.take(0), run.learner.take(0)]
    assert run.learner.ack([g.entry_id for g in groups if g], 1) == 2
    assert await run.buffer.claim("w", 100) == []
    publish(redis, 1)
    assert len(await run.buffer.claim("w", 100)) == 4


async def test_workers_share_groups_and_no_episode_goes_to_two(run: Run):
    other = run.other_worker()
    taken = await run.buffer.claim("a", 3) + await other.claim("b", 3) + await run.buffer.claim("a", 100)
    assert len(taken) == len({(t.group_id, t.index) for t in taken}) == 8


async def test_claims_at_the_same_time_never_give_an_episode_twice(run: Run):
    claims = await asyncio.gather(*(run.buffer.claim("w", 2) for _ in range(6)))
    taken = [(t.group_id, t.index) for tasks in claims for t in tasks]
    assert len(taken) == len(set(taken)) == 8


async def test_evaluations_come_before_retries_and_retries_before_new_groups(run: Run):
    first, *_ = await run.buffer.claim("w", 3)
    await run.buffer.fail("w", first, "boom")
    run.learner.start_eval("mid", 2, sampling_name="sampled", min_version=0)
    tasks = await run.buffer.claim("w", 5)
    kinds = [(t.kind, t.group_id, t.number, t.index, t.attempt) for t in tasks]
    assert kinds == [
        (EpisodeKind.EVAL, "mid", 0, 0, 0),
        (EpisodeKind.EVAL, "mid", 1, 1, 0),
        (EpisodeKind.TRAIN, "run-0", 0, 0, 1),
        (EpisodeKind.TRAIN, "run-1", 1, 1, 0),
        (EpisodeKind.TRAIN, "run-2", 2, 0, 0),
    ]


async def test_evaluations_need_no_published_weights_to_be_handed_out(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, step=-1)
    run.learner.start_eval("before", 1, sampling_name="greedy", min_version=0)
    (task,) = await run.buffer.claim("w", 5)
    assert (task.kind, task.sampling_name, task.min_version) == (EpisodeKind.EVAL, "greedy", 0)


async def test_a_claim_whose_answer_got_lost_gives_the_same_episodes_again(run: Run):
    lost = await run.buffer.claim("w", 3)
    run.buffer._nonces["w"] -= 1
    again = await run.buffer.claim("w", 3)
    assert sorted(again, key=str) == sorted(lost, key=str)
    assert run.learner.snapshot().workers[0].episodes == 3


async def test_a_retry_has_the_same_number_and_member_and_counts_its_attempt(run: Run):
    first, *_ = await run.buffer.claim("w", 100)
    await run.buffer.fail("w", first, "boom")
    (retry,) = await run.buffer.claim("w", 100)
    assert (retry.group_id, retry.number, retry.index, retry.attempt) == (first.group_id, 0, 0, 1)


async def test_a_retry_asks_for_the_weights_of_its_own_time(run: Run, redis: Redis):
    first, *_ = await run.buffer.claim("w", 100)
    await run.buffer.fail("w", first, "boom")
    publish(redis, 1)
    (retry,) = [t for t in await run.buffer.claim("w", 100) if t.number == 0]
    assert (first.min_version, retry.min_version) == (0, 1)


async def test_a_failed_episode_goes_to_another_worker_while_there_is_one(run: Run):
    other = run.other_worker()
    await other.heartbeat("b")
    first, *_ = await run.buffer.claim("a", 100)
    await run.buffer.fail("a", first, "boom")
    assert await run.buffer.claim("a", 100) == []
    assert [t.index for t in await other.claim("b", 100)] == [first.index]


async def test_attempts_end_at_the_limit_and_fail_the_group_by_that_reason(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, limits(max_attempts=3, max_groups_in_flight=1))
    task, _ = await run.buffer.claim("w", 2)
    for attempt in range(3):
        assert task.attempt == attempt
        await run.buffer.fail("w", task, "reset_timeout")
        if attempt < 2:
            (task,) = await run.buffer.claim("w", 1)
    assert run.learner.counters().failed == {"reset_timeout": 1}
    assert run.keys_left("unit") == run.keys_left("blobs") == []
    assert (await run.buffer.heartbeat("w")).cancelled[0].index == 1


async def test_failing_an_attempt_that_the_worker_does_not_hold_changes_nothing(run: Run):
    first, *_ = await run.buffer.claim("w", 100)
    await run.buffer.fail("w", first, "boom")
    await run.buffer.fail("w", first, "boom")
    await run.other_worker().fail("stranger", first, "boom")
    (retry,) = await run.buffer.claim("w", 100)
    await run.buffer.fail("w", first, "boom")
    assert retry.attempt == 1
    assert (await run.buffer.heartbeat("w")).cancelled == ()
    assert run.learner.snapshot().workers[0].episodes == 8


async def test_distinct_reasons_are_bounded(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, limits(max_attempts=1, group_size=1, total_groups=1000))
    for n in range(100):
        (task,) = await run.buffer.claim("w", 1)
        await run.buffer.fail("w", task, f"reason {n}" + "x" * 100)
    failed = run.learner.counters().failed
    assert sum(failed.values()) == 100
    assert len(failed) <= 64
    assert failed["other"] > 30


async def has_work(run: Run, worker: str = "w", timeout_s: float = 20) -> bool:
    return await run.buffer.wait_for_work(worker, timeout_s)


async def wait_until_quiet(run: Run, worker: str = "w") -> None:
    while await has_work(run, worker, 0.01):
        pass


async def test_a_waiting_worker_wakes_when_weights_come(run: Run, redis: Redis):
    tasks = await run.buffer.claim("w", 100)
    assert len(tasks) == 8
    waiting = asyncio.create_task(has_work(run))
    await asyncio.sleep(0)
    publish(redis, 1)
    assert await waiting
    assert await run.buffer.claim("w", 100)
    assert not await has_work(run, timeout_s=0.01)


async def test_what_rings_between_a_claim_and_the_wait_is_heard(run: Run, redis: Redis):
    await run.buffer.claim("w", 100)
    publish(redis, 1)
    assert await has_work(run)


@pytest.mark.parametrize("event", ["drop", "fail", "requeue", "eval", "resume", "ack", "configure"])
async def test_each_event_that_can_open_work_wakes_all_workers(run: Run, event: str):
    tasks = await run.buffer.claim("w", 100)
    await run.buffer.claim("v", 100)
    await run.submit(tasks[0])
    await run.submit(tasks[1])
    group = run.learner.take(0)
    assert group is not None
    await run.submit(tasks[2])
    await run.watch.set_paused(event == "resume")
    await wait_until_quiet(run, "w")
    await wait_until_quiet(run, "v")
    match event:
        case "drop":
            run.learner.drop(group, "stale")
        case "ack":
            run.learner.ack([group.entry_id], 1)
        case "fail":
            await run.buffer.fail("w", tasks[4], "boom")
        case "requeue":
            await run.buffer.release("w")
        case "eval":
            run.learner.start_eval("mid", 1, sampling_name="greedy", min_version=0)
        case "resume":
            await run.watch.set_paused(False)
        case _:
            run.reconfigure(max_staleness=2.0)
    assert await has_work(run, "w")
    assert await has_work(run, "v")


async def test_a_completed_group_wakes_the_worker_with_the_most_places_and_only_for_a_new_group(
    redis: Redis, async_redis: AsyncRedis
):
    run = Run.begin(redis, async_redis, limits(max_groups_in_flight=2, max_staleness=0.5))
    tasks = await run.buffer.claim("full", 4)
    for worker, places in (("few", 2), ("many", 9), ("some", 3)):
        assert await run.buffer.claim(worker, places) == []
        await wait_until_quiet(run, worker)

    async def woken(timeout_s: float = 0.01) -> list[str]:
        return [worker for worker in ("few", "some", "many") if await has_work(run, worker, timeout_s)]

    await run.submit(tasks[0], "full")
    assert await woken() == []
    await run.submit(tasks[1], "full")
    assert await has_work(run, "many")
    assert await woken() == []
    assert len(await run.buffer.claim("many", 9)) == 2
    for task in tasks[2:]:
        await run.submit(task, "full")
    assert await woken() == [], "the bound admits three groups"


async def test_a_claim_that_leaves_work_wakes_the_next_worker(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, step=-1)
    places = {"a": 3, "b": 4, "c": 2}
    for worker, limit in places.items():
        assert await run.buffer.claim(worker, limit) == []
    publish(redis, 0)
    assert all([await has_work(run, worker) for worker in places]), "weights wake all"
    assert len(await run.buffer.claim("a", 3)) == 3, "of eight episodes, in groups of two"
    assert await has_work(run, "b")
    assert not await has_work(run, "c", 0.01)
    assert len(await run.buffer.claim("b", 4)) == 4
    assert await has_work(run, "c")
    assert len(await run.buffer.claim("c", 2)) == 1
    assert [await has_work(run, worker, 0.01) for worker in places] == [False] * 3


async def test_a_worker_that_left_is_not_woken(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, step=-1)
    for worker, places in (("left", 9), ("stays", 1), ("first", 3)):
        await run.buffer.claim(worker, places)
    await run.buffer.release("left")
    publish(redis, 0)
    await wait_until_quiet(run, "stays")
    assert len(await run.buffer.claim("first", 3)) == 3
    assert await has_work(run, "stays")
    assert run.keys_left("bell:left") == []


async def test_limits_may_change_but_not_the_shape_of_a_step(run: Run):
    await run.buffer.claim("w", 1)
    run.reconfigure(max_staleness=2.0)
    assert len(await run.buffer.claim("w", 100)) == 11
    for change in ({"group_size": 4}, {"groups_per_step": 4}):
        with pytest.raises(BufferError, match="cannot become 4"):
            run.reconfigure(**change)


async def test_a_trajectory_of_another_task_is_refused(run: Run):
    first, second, *_ = await run.buffer.claim("w", 100)
    with pytest.raises(BufferError, match="does not belong"):
        await run.buffer.submit("w", first, trajectory_for(second))


async def test_a_claim_has_limits_of_training_and_of_evaluation(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, limits(max_staleness=9.0))
    run.learner.start_eval("during-sampled-0", 6, sampling_name="sampled", min_version=0)

    async def claim(limit: int, train: int, evaluation: int) -> tuple[int, int]:
        tasks = await run.buffer.claim("w", limit, ClaimLimits(train, evaluation))
        num_eval = sum(task.kind is EpisodeKind.EVAL for task in tasks)
        return len(tasks) - num_eval, num_eval

    assert await claim(10, 3, 2) == (3, 2)
    assert await claim(3, 3, 2) == (1, 2)
    assert await claim(10, 0, 1) == (0, 1)
    assert await claim(10, 4, 0) == (4, 0)
    assert await claim(2, 9, 9) == (1, 1)
    assert run.learner.counters().admitted == 5  # of 9 episodes in groups of two
