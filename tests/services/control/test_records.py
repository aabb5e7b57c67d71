from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from services.control.components import Health, Observation
from services.control.records import (
    ORPHANED_AFTER_S,
    RunExistsError,
    RunRecord,
    RunSpec,
    RunState,
    RunStore,
    UnknownRunError,
    Wanted,
)
from services.keys import RunKeys
from tests.services.control.control_fakes import FakeClock

SPEC = RunSpec("lake", '{"max_steps": 3}', "/tmp/lake", 3)
OTHER = replace(SPEC, config='{"max_steps": 4}', max_steps=4)


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[RunStore]:
    async with Redis.from_url(redis_url) as client:
        yield RunStore(client, FakeClock())


def clock_of(store: RunStore) -> FakeClock:
    assert isinstance(store.clock, FakeClock)
    return store.clock


async def test_a_record_comes_back_as_it_was_written(store: RunStore):
    created, new = await store.create(SPEC)
    assert new
    assert await store.load("lake") == created
    assert await store.run_ids() == ["lake"]


def test_every_field_survives_redis():
    record = RunRecord(
        "r",
        "{}",
        "/x",
        7,
        Wanted.KILLED,
        RunState.DRAINING,
        RunState.FAILED,
        "why",
        "log",
        3,
        1.5,
        2.5,
        3.5,
        4.5,
        5.5,
        6.5,
    )
    assert RunRecord.decode({k.encode(): v.encode() for k, v in record.encode().items()}) == record


async def test_creating_the_same_run_again_changes_nothing(store: RunStore):
    first, _ = await store.create(SPEC)
    again, new = await store.create(SPEC)
    assert (again, new) == (first, False)


async def test_a_run_that_goes_on_is_not_replaced_by_another_of_its_name(store: RunStore):
    await store.create(SPEC)
    with pytest.raises(RunExistsError, match="'lake' is preparing"):
        await store.create(OTHER)


async def test_a_run_that_nobody_looks_after_any_more_is_replaced(store: RunStore):
    await store.create(SPEC)
    clock_of(store).now += ORPHANED_AFTER_S + 1
    record, new = await store.create(OTHER)
    assert new
    assert record.config == OTHER.config


async def test_a_run_that_is_looked_after_is_not_taken_for_an_orphan(store: RunStore):
    await store.create(SPEC)
    clock_of(store).now += ORPHANED_AFTER_S + 1
    await store.set_observations("lake", {"learner": Observation(Health.READY)})
    with pytest.raises(RunExistsError):
        await store.create(OTHER)
    _, new = await store.create(OTHER, takeover=True)
    assert new


async def test_a_run_that_is_over_is_forgotten_whole_by_the_next_of_its_name(store: RunStore):
    await store.create(SPEC)
    await store.update("lake", state=RunState.FINISHED)
    await store.redis.set(RunKeys("lake").epoch, 5)
    await store.redis.set(RunKeys("lake2").epoch, 6)
    record, _ = await store.create(OTHER)
    assert record.attempt == 1
    assert await store.redis.get(RunKeys("lake").epoch) is None
    assert await store.redis.get(RunKeys("lake2").epoch) == b"6"


async def test_a_resumed_run_keeps_what_it_left_in_redis(store: RunStore):
    first, _ = await store.create(SPEC)
    await store.update("lake", state=RunState.STOPPED, error="why", wanted=Wanted.KILLED)
    await store.redis.set(RunKeys("lake").epoch, 5)
    clock_of(store).now += 5
    record, _ = await store.create(replace(OTHER, resume=True))
    assert await store.redis.get(RunKeys("lake").epoch) == b"5"
    assert (record.attempt, record.state, record.wanted, record.error) == (2, RunState.PREPARING, Wanted.RUNNING, "")
    assert record.created_at == first.created_at
    assert await store.load("lake") == record


async def test_a_run_that_is_over_stays_as_it_was_wanted(store: RunStore):
    await store.create(SPEC)
    await store.update("lake", state=RunState.FINISHED)
    await store.want("lake", Wanted.KILLED)
    assert (await store.load("lake")).wanted is Wanted.RUNNING


async def test_an_unknown_run_is_named(store: RunStore):
    with pytest.raises(UnknownRunError, match="'nobody'"):
        await store.load("nobody")


async def test_a_deleted_run_leaves_no_key(store: RunStore):
    await store.create(SPEC)
    await store.set_observations("lake", {"learner": Observation(Health.READY)})
    await store.delete("lake")
    assert await store.redis.keys("*") == []


async def test_observations_come_back(store: RunStore):
    await store.create(SPEC)
    seen = {"learner": Observation(Health.DEAD, "exit code 1", "logs/learner.out", "x")}
    await store.set_observations("lake", seen)
    assert await store.observations("lake") == seen
