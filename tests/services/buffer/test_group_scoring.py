"""Groups that rewards compare: complete groups wait for one more task, whose result moves them to the stream."""

import numpy as np
from redis import Redis

from offbeat.services.buffer.api import GroupSamples, SubmitResult
from offbeat.services.buffer.members import Addition
from offbeat.services.buffer.scores import RedisScoreQueue
from offbeat.services.keys import RunKeys
from offbeat.services.messages.types import EpisodeTask
from tests.services.buffer.buffer_play import RUN, Run, publish, run_uid, trajectory_for

ADDED = Addition(0.5, {"reward/better": 0.5})


async def submit(run: Run, task: EpisodeTask, worker: str = "w") -> SubmitResult:
    sample = f"sample {task.index}".encode()
    return await run.buffer.submit(worker, task, trajectory_for(task, worker=worker), sample)


async def play(run: Run, worker: str = "w") -> EpisodeTask:
    """Play a group, and claim the task of its rewards."""
    for task in await run.buffer.claim(worker, 2):
        assert await submit(run, task, worker) is SubmitResult.ACCEPTED
    (scoring,) = await run.buffer.claim(worker, 1)
    return scoring


async def mark_of(run: Run, task: EpisodeTask) -> str:
    return (await run.buffer.samples("w", task)).mark


async def score(run: Run, task: EpisodeTask, worker: str = "w", **additions: Addition) -> SubmitResult:
    chosen = {int(name[1:]): each for name, each in additions.items()} or {0: ADDED, 1: Addition(-1.0, {})}
    return await run.buffer.score_group(worker, task, chosen, await mark_of(run, task))


async def test_a_complete_group_waits_for_its_rewards(run: Run):
    task = await play(run)
    assert (task.is_scoring, task.is_baseline, task.number, task.index) == (True, False, 0, 2)
    assert run.learner.take(0) is None
    assert (await run.buffer.samples("w", task)).by_member == {0: b"sample 0", 1: b"sample 1"}
    (progress,) = await run.watch.groups()
    assert (progress.is_scoring, progress.missing, progress.queued, progress.played) == (True, 0, 0, 0)
    assert await score(run, task) is SubmitResult.COMPLETED
    group = run.learner.take(0)
    assert group is not None
    first, second = group.trajectories
    assert (first.reward, first.metrics) == (1.5, {"success": 1.0, "reward/better": 0.5})
    assert (second.reward, second.metrics) == (0.0, {"success": 1.0})
    np.testing.assert_array_equal(first.segments[0].tokens, np.arange(12))
    assert await run.watch.groups() == []
    assert run.learner.ack([group.entry_id], 1) == 1
    assert run.keys_left("blobs") == run.keys_left("unit") == run.keys_left("claims") == []
    counters = (await run.watch.snapshot()).counters
    assert (counters.admitted, counters.submitted, counters.trained, counters.in_flight) == (1, 1, 1, 0)


async def test_a_group_is_scored_once(run: Run):
    task = await play(run)
    assert await score(run, task) is SubmitResult.COMPLETED
    assert await score(run, task, r0=Addition(9.0, {})) is SubmitResult.DUPLICATE
    group = run.learner.take(0)
    assert group is not None
    assert [t.reward for t in group.trajectories] == [1.5, 0.0]
    assert run.learner.take(0) is None
    assert await run.buffer.samples("w", task) == GroupSamples()


async def test_a_learner_that_repeats_a_step_meets_the_same_rewards(run: Run):
    assert await score(run, await play(run)) is SubmitResult.COMPLETED
    rewards = []
    for _ in range(2):
        group = run.next_learner().take(0)
        assert group is not None
        rewards.append([t.reward for t in group.trajectories])
    assert rewards == [[1.5, 0.0]] * 2


async def test_scorers_of_models_see_the_rewards(run: Run):
    assert await score(run, await play(run)) is SubmitResult.COMPLETED
    queue = RedisScoreQueue(run.redis, RUN, run_uid(run.redis), "a", "reference@0123456789ab", lease_s=30)
    claimed = queue.claim().claimed
    assert claimed is not None
    assert claimed.group is not None
    assert [t.reward for t in claimed.group.trajectories] == [1.5, 0.0]


async def test_failing_rewards_are_tried_again_and_then_fail_the_group_by_reason(run: Run):
    task = await play(run)
    for attempt in range(3):
        assert (task.attempt, task.is_scoring) == (attempt, True)
        assert run.learner.take(0) is None
        await run.buffer.fail("w", task, "reward_malformed")
        tasks = await run.buffer.claim("w", 1)
        if attempt < 2:
            (task,) = tasks
    counters = (await run.watch.snapshot()).counters
    assert counters.failed == {"reward_malformed": 1}
    assert not tasks[0].is_scoring, "the group's room is another's"
    assert (run.keys_left("unit:t:0"), run.keys_left("blobs")) == ([], [])
    assert await score(run, task) is SubmitResult.LATE


async def test_rewards_of_a_dead_worker_go_to_another(run: Run):
    task = await play(run, "dead")
    run.silence("dead")
    other = run.other_worker()
    (again,) = await other.claim("w", 1)
    assert (again.is_scoring, again.attempt) == (True, 1)
    assert await other.score_group("w", again, {0: ADDED}, await mark_of(run, again)) is SubmitResult.COMPLETED
    assert await score(run, task, "dead") is SubmitResult.DUPLICATE


async def test_a_result_that_comes_before_the_next_claim_counts(run: Run):
    task = await play(run)
    assert await run.buffer.release("w") == 1
    assert await score(run, task) is SubmitResult.COMPLETED
    assert (await run.watch.snapshot()).queued_train == 0


async def test_a_released_task_is_claimed_again_without_an_attempt(run: Run):
    await play(run)
    await run.buffer.release("w")
    (again,) = await run.buffer.claim("v", 1)
    assert (again.is_scoring, again.attempt) == (True, 0)


async def test_a_lost_reply_to_a_claim_gives_the_task_again(run: Run):
    task = await play(run)
    lost = run.buffer
    lost._nonces["w"] -= 1  # pyright: ignore[reportPrivateUsage]
    assert await lost.claim("w", 1) == [task]


async def test_redundant_members_are_not_compared(run: Run):
    run.reconfigure(redundancy=2)
    tasks = await run.buffer.claim("w", 4)
    await run.buffer.fail("w", tasks[0], "reset_error")
    for task in tasks[1:3]:
        assert await submit(run, task) is SubmitResult.ACCEPTED
    orders = await run.buffer.heartbeat("w")
    assert orders.cancelled == (tasks[3],)
    assert await submit(run, tasks[3]) is SubmitResult.LATE
    claimed = await run.buffer.claim("w", 1)
    assert (claimed[0].is_scoring, claimed[0].index) == (True, 4)
    assert (await run.buffer.samples("w", claimed[0])).by_member == {1: b"sample 1", 2: b"sample 2"}
    (progress,) = await run.watch.groups()
    assert (progress.played, progress.queued) == (0, 0)
    additions = {1: ADDED, 2: ADDED}
    assert await run.buffer.score_group("w", claimed[0], additions, await mark_of(run, claimed[0])) == "completed"


async def test_members_without_a_sample_leave_nothing_to_compare(run: Run):
    """Such as those that an error ended."""
    for task in await run.buffer.claim("w", 2):
        result = await run.submit(task)
    assert result is SubmitResult.COMPLETED
    one, two = await run.buffer.claim("w", 2)
    await run.submit(one)
    assert await submit(run, two) is SubmitResult.ACCEPTED
    (task,) = await run.buffer.claim("w", 1)
    assert (await run.buffer.samples("w", task)).by_member == {1: b"sample 1"}


async def test_a_group_that_waits_too_long_expires_and_its_task_is_cancelled(run: Run):
    run.reconfigure(max_staleness=0.0)
    task = await play(run)
    publish(run.redis, 1)
    orders = await run.buffer.heartbeat("w")
    assert orders.cancelled == (task,)
    assert (await run.watch.snapshot()).counters.dropped == {"expired": 1}
    assert await score(run, task) is SubmitResult.LATE
    assert (run.keys_left("unit:t:0"), run.keys_left("claims"), run.keys_left("blobs")) == ([], [], [])


async def test_an_expired_task_leaves_the_queue(run: Run):
    run.reconfigure(max_staleness=0.0)
    for task in await run.buffer.claim("w", 2):
        await submit(run, task)
    assert (await run.watch.snapshot()).queued_train == 1
    publish(run.redis, 1)
    await run.buffer.heartbeat("w")
    assert (await run.watch.snapshot()).queued_train == 0


async def test_a_worker_that_joins_again_keeps_its_task(run: Run):
    task = await play(run)
    await run.buffer._join_as("w")  # pyright: ignore[reportPrivateUsage]
    assert (await run.buffer.heartbeat("w")).cancelled == ()
    assert await score(run, task) is SubmitResult.COMPLETED


async def test_idle_workers_are_woken_for_a_groups_rewards(run: Run):
    run.reconfigure(total_groups=2)
    tasks = await run.buffer.claim("w", 2)
    idle = run.other_worker()
    await idle.claim("idle", 8)
    for task in tasks:
        await submit(run, task)
    assert await idle.wait_for_work("idle", 10.0)
    assert [task.is_scoring for task in await idle.claim("idle", 8)] == [True]


def copy_keys(redis: Redis) -> dict[bytes, bytes]:
    return {key: redis.dump(key) for key in redis.scan_iter()}  # type: ignore[misc]


def go_back(redis: Redis, keys: dict[bytes, bytes]) -> None:
    """Put an earlier state in place, with the incarnation that a learner's reconciliation gives it."""
    redis.flushall()
    for key, dump in keys.items():
        redis.restore(key, 0, dump)
    redis.append(RunKeys(RUN).incarnation, "-later")


async def test_rewards_of_answers_that_redis_has_lost_are_late(run: Run):
    """Another worker has played the last member again: its group waits for rewards anew, also in the first attempt."""
    one, two = await run.buffer.claim("w", 2)
    await submit(run, one)
    before = copy_keys(run.redis)
    await submit(run, two)
    (scoring,) = await run.buffer.claim("w", 1)
    mark = await mark_of(run, scoring)
    go_back(run.redis, before)
    run.silence("w")
    other = run.other_worker()
    (again,) = [task for task in await other.claim("v", 2) if task.number == 0]
    await other.submit("v", again, trajectory_for(again), b"another answer")
    assert await run.buffer.score_group("w", scoring, {0: ADDED, 1: ADDED}, mark) is SubmitResult.LATE
    assert run.keys_left("claims:w") == []
    (claimed,) = [task for task in await other.claim("v", 1) if task.is_scoring]
    current = await other.samples("v", claimed)
    assert (claimed.attempt, current.by_member) == (0, {0: b"sample 0", 1: b"another answer"})
    assert await other.score_group("v", claimed, {1: ADDED}, current.mark) is SubmitResult.COMPLETED
    group = run.learner.take(0)
    assert group is not None
    assert [trajectory.reward for trajectory in group.trajectories] == [1.0, 1.5]


async def test_rewards_of_samples_that_redis_still_has_count_after_it_went_back(run: Run):
    task = await play(run)
    mark, before = await mark_of(run, task), copy_keys(run.redis)
    go_back(run.redis, before)
    assert await run.buffer.score_group("w", task, {0: ADDED}, mark) is SubmitResult.COMPLETED
