import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.buffer.admin import release_all_workers
from offbeat.services.buffer.scripts import BufferKeys
from offbeat.services.messages.types import EpisodeTask
from tests.services.buffer.buffer_play import RUN, Run, limits


async def test_episodes_of_a_worker_that_is_silent_too_long_go_to_others(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, limits(max_groups_in_flight=1))
    await run.buffer.claim("dead", 1)
    other = run.other_worker()
    (rest,) = await other.claim("alive", 10)
    run.silence("dead")
    taken = await other.claim("alive", 10)
    assert [(t.number, t.index, t.attempt) for t in taken] == [(0, 1 - rest.index, 1)]
    assert [w.worker_id for w in run.learner.snapshot().workers] == ["alive"]


async def test_a_worker_that_beats_keeps_its_episodes(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis)
    tasks = await run.buffer.claim("w", 4)
    other = run.other_worker()
    await other.heartbeat("other")
    for _ in range(3):
        run.silence("w")
        assert (await run.buffer.heartbeat("w")).cancelled == ()
        await other.heartbeat("other")
    assert run.learner.snapshot().workers[0].episodes + run.learner.snapshot().workers[1].episodes == len(tasks)


async def test_a_worker_thought_dead_is_ordered_to_stop_what_others_play(run: Run):
    tasks = await run.buffer.claim("slow", 2)
    run.silence("slow")
    other = run.other_worker()
    assert len(await other.claim("quick", 2)) == 2
    assert set((await run.buffer.heartbeat("slow")).cancelled) == set(tasks)


async def test_silence_while_redis_was_away_kills_no_worker(run: Run, redis: Redis):
    await run.buffer.claim("a", 2)
    other = run.other_worker()
    await other.claim("b", 2)
    ledger = f"{BufferKeys(RUN).root}:ledger"
    swept = int(redis.hget(ledger, "swept"))  # type: ignore[arg-type]
    redis.hset(ledger, mapping={"swept": swept - 3_600_000})
    await other.heartbeat("b")
    assert [w.episodes for w in run.learner.snapshot().workers] == [2, 2]


async def test_deaths_count_as_attempts_so_that_a_poisonous_episode_ends(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, limits(max_attempts=2, max_groups_in_flight=1, max_staleness=0.0))
    other = run.other_worker()
    for victim in ("first", "second"):
        await run.other_worker().claim(victim, 1)
        run.silence(victim)
        await other.heartbeat("other")
    assert run.learner.counters().failed == {"worker_died": 1}


async def test_a_death_that_fails_a_group_leaves_nothing_of_it(redis: Redis, async_redis: AsyncRedis):
    run = Run.begin(redis, async_redis, limits(max_attempts=1, max_groups_in_flight=1))
    assert len(await run.buffer.claim("victim", 2)) == 2
    run.silence("victim")
    await run.other_worker().heartbeat("other")
    assert run.learner.counters().failed == {"worker_died": 1}
    assert run.learner.snapshot().queued_train == 0
    assert run.keys_left("unit") == run.keys_left("claims") == []


async def test_a_worker_that_stops_gives_its_episodes_back_uncounted(run: Run):
    tasks = await run.buffer.claim("w", 3)
    assert await run.buffer.release("w") == 3
    assert await run.buffer.release("w") == 0
    again = await run.other_worker().claim("v", 3)
    assert {(t.group_id, t.index, t.attempt) for t in again} == {(t.group_id, t.index, 0) for t in tasks}
    assert [w.worker_id for w in run.learner.snapshot().workers] == ["v"]


async def test_a_new_process_under_an_old_name_frees_what_the_old_one_played(run: Run):
    (old,) = await run.buffer.claim("w", 1)
    reborn = run.other_worker()
    await reborn.heartbeat("w")
    assert run.learner.snapshot().workers[0].episodes == 0
    (again,) = [t for t in await reborn.claim("w", 100) if t.attempt]
    assert (again.group_id, again.index) == (old.group_id, old.index)


async def test_a_run_that_starts_again_frees_everything_at_once(run: Run, redis: Redis):
    tasks = await run.buffer.claim("a", 3) + await run.other_worker().claim("b", 3)
    await run.submit(tasks[0], "a")
    assert release_all_workers(redis, RUN) == 5
    again = await run.other_worker().claim("c", 5)
    assert {(t.group_id, t.index, t.attempt) for t in again} == {(t.group_id, t.index, 0) for t in tasks[1:]}
    assert run.keys_left("claims") == [f"{BufferKeys(RUN).root}:claims:c"]


async def test_a_paused_run_hands_out_nothing_and_says_so(run: Run):
    run.learner.start_eval("mid", 1, sampling_name="greedy", min_version=0)
    await run.watch.set_paused(True)
    assert await run.buffer.claim("w", 10) == []
    assert (await run.buffer.heartbeat("w")).draining
    await run.watch.set_paused(False)
    assert not (await run.buffer.heartbeat("w")).draining
    assert len(await run.buffer.claim("w", 10)) == 9


async def test_what_is_played_may_still_be_submitted_while_paused(run: Run):
    tasks = await run.buffer.claim("w", 2)
    await run.watch.set_paused(True)
    for task in tasks:
        await run.submit(task)
    assert run.learner.take(0) is not None


@pytest.mark.parametrize("ending", ["submit", "fail"])
async def test_an_ended_episode_is_not_cancelled_later(run: Run, ending: str):
    tasks = await run.buffer.claim("w", 2)
    for task in tasks:
        await (run.submit(task) if ending == "submit" else run.buffer.fail("w", task, "boom"))
    assert (await run.buffer.heartbeat("w")).cancelled == ()


async def test_a_heartbeat_names_episodes_only_if_their_number_is_not_that_of_the_claims(run: Run, redis: Redis):
    tasks = await run.buffer.claim("w", 3)

    async def calls() -> int:
        before = redis.info("commandstats")["cmdstat_evalsha"]["calls"]  # type: ignore[index]
        orders = await run.buffer.heartbeat("w")
        cancelled.extend(orders.cancelled)
        return redis.info("commandstats")["cmdstat_evalsha"]["calls"] - before  # type: ignore[index]

    cancelled: list[EpisodeTask] = []
    await run.buffer.heartbeat("w")  # its source is sent once
    assert (await calls(), cancelled) == (1, [])
    run.silence("w")
    await run.other_worker().heartbeat("other")
    assert (await calls(), set(cancelled)) == (2, set(tasks))
    assert await calls() == 1


async def test_an_episode_is_cancelled_after_a_claim_whose_reply_is_under_way_makes_up_the_number(
    run: Run, redis: Redis
):
    (old,) = await run.buffer.claim("w", 1)
    under_way = await run.buffer.claim("w", 1)
    held = run.buffer._active["w"]
    (token,) = [token for token, task in held.items() if task == old]
    run.buffer._active["w"] = {token: old}
    run.buffer._nonces["w"] -= 1
    redis.hdel(f"{BufferKeys(RUN).root}:claims:w", token)
    assert (await run.buffer.heartbeat("w")).cancelled == ()
    assert await run.buffer.claim("w", 1) == under_way
    assert (await run.buffer.heartbeat("w")).cancelled == (old,)
