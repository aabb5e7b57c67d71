import asyncio
import threading

import msgpack
import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.buffer import learner_client
from offbeat.services.buffer.api import Proof, Snapshot
from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.buffer.scripts import BufferKeys
from offbeat.services.errors import BufferError, FencedError
from offbeat.services.keys import RunKeys
from offbeat.services.messages.codec import encode_trajectory
from offbeat.services.messages.types import SCHEMA_VERSION, Group
from tests.copying import replace
from tests.services.buffer.buffer_play import (
    RUN,
    Run,
    limits,
    publish,
    trajectory_for,
)


def take_all(learner: RedisLearnerBuffer) -> list[Group]:
    groups = []
    while (group := learner.take(0)) is not None:
        groups.append(group)
    return groups


async def test_groups_come_in_the_order_of_their_completion(run: Run):
    tasks = await run.buffer.claim("w", 8)
    for number in (2, 0, 3, 1):
        for task in tasks:
            if task.number == number:
                await run.submit(task)
    assert [g.number for g in take_all(run.learner)] == [2, 0, 3, 1]


async def test_admission_order_waits_for_earlier_running_groups(run: Run):
    tasks = await run.buffer.claim("w", 8)
    learner = run.next_learner(order="admission")
    delivered: list[list[int]] = []
    for number in (2, 0, 3, 1):
        for task in tasks:
            if task.number == number:
                await run.submit(task)
        delivered.append([group.number for group in take_all(learner)])
    assert delivered == [[], [0], [], [1, 2, 3]]


async def test_in_order_of_admission_a_failed_group_is_not_awaited(run: Run):
    tasks = await run.buffer.claim("w", 8)
    learner = run.next_learner(order="admission")
    for task in tasks:
        if task.number == 1:
            await run.submit(task)
    taken: list[Group | None] = []
    waiting = threading.Thread(target=lambda: taken.append(learner.take(30)))
    waiting.start()
    for _ in range(3):
        await run.buffer.fail("w", next(task for task in tasks if task.number == 0), "crash")
        tasks = [*await run.buffer.claim("w", 8), *tasks]
    waiting.join(20)
    assert [group and group.number for group in taken] == [1]


async def test_in_order_of_admission_the_awaited_group_wakes_the_learner(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(learner_client, "MAX_BLOCK_S", 60.0)
    first, second, *others = await run.buffer.claim("w", 8)
    for task in others:
        if task.number == 1:
            await run.submit(task)
    learner = run.next_learner(order="admission")
    await run.submit(first)
    waiting = asyncio.create_task(asyncio.to_thread(learner.take, 50))
    await asyncio.wait([waiting], timeout=0.3)  # it blocks in Redis by then
    await run.submit(second)
    group = await asyncio.wait_for(waiting, 20)
    assert group is not None
    assert group.number == 0


async def test_in_order_of_admission_a_learner_that_restarts_gets_the_same_order(run: Run):
    tasks = await run.buffer.claim("w", 8)
    for number in (3, 1, 0, 2):
        for task in tasks:
            if task.number == number:
                await run.submit(task)
    first = run.next_learner(order="admission")
    assert [group.number for group in (first.take(0), first.take(0)) if group] == [0, 1]
    assert [group.number for group in take_all(run.next_learner(order="admission"))] == [0, 1, 2, 3]


async def test_a_learner_that_restarts_gets_the_same_groups_in_the_same_order(run: Run):
    await run.complete_groups(3)
    first = take_all(run.learner)
    await run.complete_groups(1)
    assert run.learner.ack([first[0].entry_id], 1) == 1
    again = take_all(run.next_learner())
    assert [g.number for g in again] == [1, 2, 3]
    assert [g.entry_id for g in again[:2]] == [g.entry_id for g in first[1:]]


async def test_a_take_whose_answer_got_lost_is_given_again(run: Run):
    await run.complete_groups(2)
    lost = run.learner.take(0)
    assert lost is not None
    run.learner._last = "0-0"
    run.learner._release([lost.entry_id])
    again = run.learner.take(0)
    assert again is not None
    assert again.entry_id == lost.entry_id
    assert [g.number for g in take_all(run.learner)] == [1]


async def test_a_waiting_learner_wakes_when_a_group_is_complete(run: Run):
    tasks = await run.buffer.claim("w", 2)
    taken: list[Group | None] = []
    waiting = threading.Thread(target=lambda: taken.append(run.learner.take(30)))
    waiting.start()
    for task in tasks:
        await run.submit(task)
    waiting.join(20)
    assert not waiting.is_alive()
    assert taken[0] is not None
    assert taken[0].number == 0


async def test_a_take_ends_when_its_time_is_over(run: Run):
    assert run.learner.take(0.05) is None


async def test_acknowledging_twice_counts_once(run: Run):
    await run.complete_groups(2)
    ids = [g.entry_id for g in take_all(run.learner)]
    assert run.learner.ack(ids[:1], 1) == 1
    assert run.learner.ack(ids, 2) == 1
    assert run.learner.ack(ids, 2) == 0
    assert run.learner.ack([], 3) == 0
    counters = run.learner.counters()
    assert (counters.trained, counters.in_flight) == (2, 0)
    assert run.keys_left("blobs") == []
    assert run.learner.snapshot().consumed == 0


def test_a_checkpoint_of_any_number_of_groups_is_acknowledged(run: Run, redis: Redis):
    """Lua unpacks 8,000 values at most."""
    with redis.pipeline() as pipe:
        for number in range(10_000):
            pipe.xadd(BufferKeys(RUN).stream, {"n": number, "v": 0, "t": ""})
        ids = [entry_id.decode() for entry_id in pipe.execute()]
    assert run.learner.ack(ids, 5) == 10_000
    assert run.learner.counters().trained == 10_000
    assert redis.xlen(BufferKeys(RUN).stream) == 0


async def test_closing_drops_played_and_running_groups_and_leaves_nothing(run: Run):
    await run.complete_groups(2)
    taken = run.learner.take(0)
    assert taken is not None
    tasks = await run.buffer.claim("w", 3)
    await run.submit(tasks[0])
    assert run.learner.close("unneeded") == 4
    assert run.learner.close("unneeded") == 0
    counters = run.learner.counters()
    assert (counters.dropped, counters.in_flight) == ({"unneeded": 4}, 0)
    assert run.keys_left("blobs") == run.keys_left("unit") == run.keys_left("claims") == []
    assert run.learner.ack([taken.entry_id], 1) == 0
    replaced = run.learner
    run.next_learner()
    with pytest.raises(FencedError):
        replaced.close("unneeded")


async def test_a_drop_is_counted_once_and_frees_its_blobs(run: Run):
    await run.complete_groups(1)
    (group,) = take_all(run.learner)
    run.learner.drop(group, "no_signal")
    run.learner.drop(group, "no_signal")
    assert run.learner.ack([group.entry_id], 1) == 0
    assert run.learner.counters().dropped == {"no_signal": 1}
    assert run.keys_left("blobs") == []
    assert take_all(run.next_learner()) == []


def snapshot_at_rest(run: Run) -> Snapshot:
    """Return a snapshot without its workers' silence, which grows."""
    snapshot = run.learner.snapshot()
    return replace(snapshot, workers=tuple(replace(worker, silent_s=0.0) for worker in snapshot.workers))


async def test_every_write_of_a_replaced_learner_is_refused(run: Run):
    await run.complete_groups(2)
    run.learner.start_eval("e", 1, sampling_name="greedy", min_version=0)
    old = run.learner
    group = old.take(0)
    assert group is not None
    run.next_learner()
    before = snapshot_at_rest(run)
    for write in (
        lambda: old.take(0),
        lambda: old.drop(group, "stale"),
        lambda: old.ack([group.entry_id], 1),
        lambda: old.reconcile(Proof(num_trained=5)),
        lambda: old.start_eval("f", 1, sampling_name="greedy", min_version=0),
        lambda: old.forget_eval("e"),
    ):
        with pytest.raises(FencedError, match="epoch 1 does not hold the run, its epoch is 2"):
            write()
    assert snapshot_at_rest(run) == before


async def test_a_learner_without_a_lease_of_this_redis_is_fenced(run: Run):
    with pytest.raises(FencedError):
        RedisLearnerBuffer(run.redis, RUN, 7).take(0)


@pytest.mark.parametrize("damage", ["truncated", "stranger", "other_seed", "missing"])
async def test_a_group_that_cannot_be_read_is_dropped_and_kept_aside(run: Run, damage: str):
    tasks = await run.buffer.claim("w", 4)
    for task in tasks:
        await run.submit(task)
    blob = encode_trajectory(trajectory_for(tasks[1]))
    match damage:
        case "truncated":
            run.overwrite_blob(0, 1, blob[:-3])
        case "stranger":
            run.overwrite_blob(0, 1, encode_trajectory(trajectory_for(tasks[3])))
        case "other_seed":
            run.overwrite_blob(0, 1, encode_trajectory(replace(trajectory_for(tasks[1]), seed=7)))
        case _:
            run.redis.delete(f"{BufferKeys(RUN).root}:blobs:t:0")
    group = run.learner.take(0)
    assert group is not None
    assert group.number == 1
    counters = run.learner.counters()
    assert (counters.dropped, counters.in_flight) == ({"corrupt": 1}, 1)
    quarantined = await run.watch.quarantine()
    expected = {"truncated": [1], "stranger": [1], "other_seed": [0, 1], "missing": []}[damage]
    assert sorted((entry.unit, entry.index) for entry in quarantined) == [("t:0", index) for index in expected]
    if damage == "truncated":
        assert quarantined[0].blob == blob[:-3]
        assert "not a trajectory message" in quarantined[0].complaint
    assert len(await run.buffer.claim("w", 100)) == 6


async def test_a_trajectory_of_a_later_schema_is_set_aside_and_its_group_replaced(run: Run):
    """An env worker of a later build beside a learner of this one; other groups are trained."""
    await run.complete_groups(2)
    run.overwrite_blob(0, 1, msgpack.packb(("trajectory", SCHEMA_VERSION + 1, ["a", "b"])))
    group = run.learner.take(0.1)
    assert group is not None
    assert group.number == 1
    assert run.learner.counters().dropped == {"corrupt": 1}
    (aside,) = await run.watch.quarantine()
    assert (aside.unit, aside.index) == ("t:0", 1)
    assert f"has schema version {SCHEMA_VERSION + 1}, this build reads {SCHEMA_VERSION}" in aside.complaint
    await run.complete_groups(1)
    replacement = run.learner.take(0.1)
    assert replacement is not None
    assert replacement.number == 2


async def test_quarantine_keeps_the_newest_few(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, limits(max_staleness=99.0))
    for number in range(12):
        await run.complete_groups(1)
        for index in (0, 1):
            run.overwrite_blob(number, index, b"junk")
    assert run.learner.take(0) is None
    assert run.learner.snapshot().quarantined == 16


async def test_an_evaluation_is_complete_when_each_episode_came_or_failed(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, limits(max_attempts=1))
    run.learner.start_eval("before", 4, sampling_name="sampled", min_version=0)
    run.learner.start_eval("before", 4, sampling_name="sampled", min_version=0)
    tasks = await run.buffer.claim("w", 4)
    assert [t.number for t in tasks] == [0, 1, 2, 3]
    for task in reversed(tasks[1:]):
        await run.submit(task)
    assert run.learner.eval_result("before") is None
    await run.buffer.fail("w", tasks[0], "boom")
    trajectories = run.learner.wait_eval("before", 5)
    assert trajectories is not None
    assert [t.index for t in trajectories] == [1, 2, 3]
    assert run.learner.counters().admitted == 0
    run.learner.forget_eval("before")
    run.learner.forget_eval("before")
    assert run.keys_left("unit") == run.keys_left("blobs") == []
    with pytest.raises(BufferError, match="UNKNOWN evaluation before"):
        run.learner.eval_result("before")


async def test_several_evaluations_run_at_once(run: Run):
    for name in ("sampled", "greedy"):
        run.learner.start_eval(f"s10:{name}", 2, sampling_name=name, min_version=0)
    tasks = await run.buffer.claim("w", 4)
    assert [(t.group_id, t.sampling_name) for t in tasks] == [("s10:sampled", "sampled")] * 2 + [
        ("s10:greedy", "greedy")
    ] * 2
    for task in tasks[2:]:
        await run.submit(task)
    assert run.learner.eval_result("s10:sampled") is None
    assert len(run.learner.eval_result("s10:greedy") or []) == 2


async def test_an_evaluation_that_another_thread_reconciled_is_restarted_first(
    run: Run, redis: Redis, monkeypatch: pytest.MonkeyPatch
):
    """The watch reconciles while the learner is about to ask for the result."""
    learner = run.learner
    learner.reconcile(Proof())
    learner.prove_with(Proof, lambda _: learner.start_eval("e", 2, sampling_name="greedy", min_version=0))
    learner.start_eval("e", 2, sampling_name="greedy", min_version=0)
    redis.delete(*redis.scan_iter(f"{BufferKeys(RUN).root}:*"), RunKeys(RUN).incarnation)
    announce = learner._announce

    def announce_before_the_watch() -> None:
        announce()
        watch = threading.Thread(target=learner.reconcile_if_needed)
        watch.start()
        watch.join()

    monkeypatch.setattr(learner, "_announce", announce_before_the_watch)
    assert learner.eval_result("e") is None


async def test_a_forgotten_evaluation_is_cancelled(run: Run):
    run.learner.start_eval("mid", 3, sampling_name="greedy", min_version=0)
    (task,) = await run.buffer.claim("w", 1)
    run.learner.forget_eval("mid")
    assert (await run.buffer.heartbeat("w")).cancelled == (task,)
    assert run.learner.snapshot().queued_eval == 0


async def test_a_dead_workers_evaluation_episodes_are_played_by_another(run: Run):
    run.learner.start_eval("mid", 2, sampling_name="greedy", min_version=0)
    await run.buffer.claim("dead", 2)
    run.silence("dead")
    again = await run.other_worker().claim("w", 2)
    assert {(t.group_id, t.number, t.attempt) for t in again} == {("mid", 0, 1), ("mid", 1, 1)}


async def test_a_fresh_redis_continues_from_the_checkpoint(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, limits(max_staleness=0.0), step=5)
    assert run.learner.reconcile(Proof(num_trained=10)).num_added == 10
    assert run.learner.reconcile(Proof(num_trained=10)).num_added == 0
    counters = run.learner.counters()
    assert (counters.admitted, counters.trained, counters.in_flight) == (10, 10, 0)
    assert {t.number for t in await run.buffer.claim("w", 100)} == {10, 11}


async def test_a_fresh_redis_gives_no_number_twice_that_the_checkpoint_knows(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, limits(max_staleness=0.0), step=5)
    run.learner.reconcile(Proof(num_trained=10, next_number=13))
    assert {t.number for t in await run.buffer.claim("w", 100)} == {13, 14}


async def test_groups_acknowledged_past_the_checkpoint_are_replaced(run: Run):
    await run.complete_groups(4)
    run.learner.ack([g.entry_id for g in take_all(run.learner)], 2)
    assert run.learner.reconcile(Proof(num_trained=2)).num_added == -2
    counters = run.learner.counters()
    assert (counters.admitted, counters.trained, counters.dropped) == (4, 2, {"rewound": 2})
    assert {t.number for t in await run.buffer.claim("w", 100)} == {4, 5}


async def test_restoring_an_ordinary_checkpoint_changes_nothing(run: Run, redis: Redis):
    await run.complete_groups(4)
    run.learner.ack([g.entry_id for g in take_all(run.learner)[:2]], 1)
    publish(redis, 1)
    before = snapshot_at_rest(run)
    assert run.learner.reconcile(Proof(num_trained=2)).num_added == 0
    assert snapshot_at_rest(run) == before
