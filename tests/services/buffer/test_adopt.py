"""Changes of a run's settings: adopted at a step boundary, once, and kept."""

import json
from typing import cast

import pytest
from redis import Redis

from offbeat.services.buffer.admin import configure_buffer
from offbeat.services.buffer.admission import GroupCounts, count_admissible
from offbeat.services.buffer.api import Proof
from offbeat.services.buffer.scripts import BufferKeys
from offbeat.services.errors import FencedError
from offbeat.services.keys import RunKeys
from offbeat.services.live_settings import (
    Settings,
    encode_change,
    settings_at,
    settings_now,
)
from tests.copying import replace
from tests.services.buffer.buffer_play import RUN, Run, limits, publish

BASE = Settings(
    num_workers=1, num_replicas=1, learning_rate=1e-3, temperature=1.0, max_staleness=1.0, num_env_groups=24
)


def ask(redis: Redis, **values: float) -> None:
    redis.rpush(RunKeys(RUN).changes, encode_change(values, 1000.0))


async def test_a_change_holds_from_the_boundary_that_adopts_it(run: Run, redis: Redis):
    assert run.learner.adopt(0).changes == ()
    ask(redis, learning_rate=3e-4)
    ask(redis, learning_rate=2e-4, num_workers=3)
    boundary = run.learner.adopt(5)
    assert [change.step for change in boundary.changes] == [5, 5]
    assert settings_at(BASE, boundary.changes, 4) == BASE
    assert settings_at(BASE, boundary.changes, 5) == replace(BASE, learning_rate=2e-4, num_workers=3)


def read_history(redis: Redis) -> list[tuple[bytes, dict[bytes, bytes]]]:
    return cast(list[tuple[bytes, dict[bytes, bytes]]], redis.xrange(RunKeys(RUN).history))


async def test_a_change_is_adopted_once_whatever_is_repeated(run: Run, redis: Redis):
    ask(redis, temperature=0.5)
    first = run.learner.adopt(2)
    assert run.learner.adopt(2) == first
    assert run.next_learner().adopt(0) == first
    assert run.learner.adopt(7) == first


async def test_an_adoption_that_redis_lost_alone_keeps_its_step(run: Run, redis: Redis):
    """The request was written earlier, and is still there."""
    ask(redis, max_staleness=2.0)
    first = run.learner.adopt(3)
    events = [fields for _, fields in read_history(redis)]
    redis.delete(RunKeys(RUN).adopted, RunKeys(RUN).history)
    redis.hset(BufferKeys(RUN).limits, "max_staleness", "1.0")
    run.learner.reconcile(Proof())
    assert run.learner.adopt(4) == first
    assert [fields for _, fields in read_history(redis)] == events != []
    assert redis.hget(BufferKeys(RUN).limits, "max_staleness") == b"2"


async def test_repeated_steps_use_their_first_settings(run: Run, redis: Redis):
    publish(redis, 9)
    ask(redis, learning_rate=3e-4)
    boundary = run.next_learner().adopt(4)
    assert [change.step for change in boundary.changes] == [9]
    assert settings_at(BASE, boundary.changes, 8).learning_rate == 1e-3


async def test_admission_follows_the_new_bound_and_temperature_at_once(run: Run, redis: Redis):
    assert len(await run.buffer.claim("w", 100)) == 8
    ask(redis, max_staleness=2.0, temperature=0.9)
    assert await run.buffer.claim("w", 100) == []
    run.learner.adopt(0)
    tasks = await run.buffer.claim("w", 100)
    assert [(task.number, task.temperature) for task in tasks] == [(4, 0.9), (4, 0.9), (5, 0.9), (5, 0.9)]


async def test_a_group_shows_the_learner_what_it_was_sampled_at(run: Run, redis: Redis):
    await run.complete_groups(1)
    ask(redis, temperature=0.25)
    run.learner.adopt(0)
    await run.complete_groups(1)
    taken = [run.learner.take(0), run.learner.take(0)]
    assert [group.temperature for group in taken if group] == [None, 0.25]


async def test_a_group_keeps_its_temperature_when_the_run_is_resumed_with_another(run: Run, redis: Redis):
    configure_buffer(redis, RUN, limits(temperature=1.0))
    await run.complete_groups(1)
    (playing, *_) = await run.buffer.claim("w", 1)
    configure_buffer(redis, RUN, limits(temperature=0.7))
    rest = await run.buffer.claim("w", 3)
    assert (playing.temperature, [task.temperature for task in rest]) == (1.0, [1.0, 0.7, 0.7])
    group = run.learner.take(0)
    assert group is not None
    assert group.temperature == 1.0


async def test_groups_of_any_size_are_admitted_whole(run: Run, redis: Redis):
    """Lua unpacks some 8,000 values at most."""
    redis.delete(BufferKeys(RUN).limits)
    configure_buffer(redis, RUN, limits(group_size=9_000))
    assert len(await run.buffer.claim("w", 2_100)) == 2_100
    assert redis.llen(f"{BufferKeys(RUN).root}:queue:t") == 6_900


async def test_a_fraction_of_a_version_is_as_many_groups(run: Run, redis: Redis):
    """12 * (1 + 2 / 12 + 1) is a little more than 26 in floats."""
    redis.delete(BufferKeys(RUN).limits)
    bound = limits(group_size=1, groups_per_step=12, max_staleness=2 / 12, max_groups_in_flight=100)
    configure_buffer(redis, RUN, bound)
    publish(redis, 1)
    assert len(await run.buffer.claim("w", 100)) == 26
    assert count_admissible(bound, 1, GroupCounts(standing=0, playing=0))[0] == 26


async def test_fractional_staleness_admits_part_of_a_batch_a_version_later(run: Run, redis: Redis):
    ask(redis, max_staleness=0.5)
    run.learner.adopt(0)
    await run.buffer.claim("w", 4)
    publish(redis, 1)
    assert len((await run.buffer.heartbeat("w")).cancelled) == 0
    publish(redis, 2)
    assert len((await run.buffer.heartbeat("w")).cancelled) == 4


async def test_a_lower_bound_gives_up_groups_that_no_step_can_consume_any_more(run: Run, redis: Redis):
    await run.buffer.claim("w", 4)
    publish(redis, 1)
    assert len((await run.buffer.heartbeat("w")).cancelled) == 0
    ask(redis, max_staleness=0.0)
    run.learner.adopt(1)
    assert len((await run.buffer.heartbeat("w")).cancelled) == 4
    assert run.learner.counters().dropped == {"expired": 2}


async def test_adopted_changes_outlive_a_new_configuration_of_the_same_run(run: Run, redis: Redis):
    ask(redis, max_staleness=3.0)
    run.learner.adopt(0)
    ask(redis, max_staleness=7.0)
    run.reconfigure()
    assert float(redis.hget(f"{RunKeys(RUN).key('buffer')}:limits", "max_staleness")) == 3.0  # type: ignore[arg-type]


async def test_the_learner_hears_that_the_run_pauses_or_ends(run: Run, redis: Redis):
    await run.watch.set_paused(True)
    assert run.learner.adopt(0).paused
    await run.watch.set_paused(False)
    for desired, ends in (("running", False), ("stopped", True), ("killed", True), ("paused", False)):
        redis.hset(RunKeys(RUN).record, "wanted", desired)
        boundary = run.learner.adopt(0)
        assert (boundary.paused, boundary.ends) == (False, ends)


async def test_a_learner_that_was_replaced_adopts_nothing(run: Run, redis: Redis):
    ask(redis, learning_rate=1.0)
    old = run.learner
    run.next_learner()
    with pytest.raises(FencedError):
        old.adopt(0)
    assert redis.hlen(RunKeys(RUN).adopted) == 0


async def test_history_shows_what_was_adopted_when(run: Run, redis: Redis):
    ask(redis, learning_rate=0.5)
    run.learner.adopt(3)
    ((_, fields),) = read_history(redis)
    assert fields[b"e"] == b"adopted"
    assert json.loads(fields[b"d"]) == {"values": {"learning_rate": 0.5}, "step": 3}


def test_counts_hold_at_once_and_the_rest_once_it_is_adopted():
    from offbeat.services.live_settings import Change

    changes = [Change({"num_workers": 4, "learning_rate": 0.5}), Change({"temperature": 0.5}, step=2)]
    assert settings_now(BASE, changes) == replace(BASE, num_workers=4, temperature=0.5)


async def test_a_step_reads_the_changes_since_the_last_one_alone(run: Run, redis: Redis):
    """A staleness controller makes thousands in a long run."""

    def adopt(step: int) -> tuple[int, int]:
        before = redis.info("commandstats")
        num = len(run.learner.adopt(step).changes)
        after = redis.info("commandstats")
        calls = (
            after.get(each, {}).get("calls", 0) - before.get(each, {}).get("calls", 0)
            for each in ("cmdstat_hsetnx", "cmdstat_hget")
        )
        return num, sum(calls)

    for i in range(300):
        ask(redis, num_env_groups=i + 1)
    num, num_calls = adopt(1)
    assert (num, num_calls >= 600) == (300, True)
    ask(redis, num_env_groups=7)
    num, num_calls = adopt(2)
    assert num == 301
    assert num_calls < 20
    assert settings_now(BASE, run.learner.adopt(3).changes).num_env_groups == 7
    assert [change.step for change in run.next_learner().adopt(0).changes] == [1] * 300 + [2]
