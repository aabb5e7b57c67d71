"""The reconciler's loop over all runs, and records that Redis has lost."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from offbeat.services.control.reconciler import Reconciler
from offbeat.services.control.run import (
    DesiredState,
    LostRecordError,
    RunRecord,
    RunSpec,
    RunState,
    UnknownRunError,
)
from offbeat.services.control.store import RunStore
from tests.copying import replace
from tests.services.control.control_fakes import SETTINGS, SPEC, FakeMesh
from tests.waiting import wait_until


async def test_the_loop_reconciles_every_run_and_at_once_when_woken(async_redis: Redis):
    meshes = {"a": FakeMesh(), "b": FakeMesh()}
    store = RunStore(async_redis)
    for run_id in meshes:
        await store.create(RunSpec(run_id, "{}", f"/tmp/{run_id}", 1, SETTINGS))
    reconciler = Reconciler(store, lambda record: meshes[record.run_id], reconcile_s=0.05)
    task = asyncio.create_task(reconciler.run())

    def states(wanted: RunState) -> Callable[[], Awaitable[bool]]:
        async def reached() -> bool:
            return all([(await store.load(run_id)).state is wanted for run_id in meshes])

        return reached

    await wait_until(states(RunState.RUNNING))
    for run_id in meshes:
        await store.want(run_id, DesiredState.KILLED)
    reconciler.wake()
    await wait_until(states(RunState.STOPPED))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_runs_of_another_mesh_are_not_reconciled(store: RunStore, mesh: FakeMesh):
    """Nor one that another mesh has started again."""
    theirs = replace(store, mesh="theirs")
    reconciler = Reconciler(theirs, lambda _: mesh)
    assert await reconciler._active_runs() == []
    assert await reconciler.reconcile(SPEC.run_id) is RunState.PREPARING
    await theirs.create(SPEC, takeover=True)
    assert await reconciler._active_runs() == [SPEC.run_id]
    assert await Reconciler(store, lambda _: mesh).reconcile(SPEC.run_id) is RunState.PREPARING
    assert await reconciler.reconcile(SPEC.run_id) is not RunState.PREPARING


async def test_a_redis_that_is_gone_for_long_does_not_end_the_looking(async_redis: Redis, mesh: FakeMesh):
    outages = [ConnectionError("gone"), ConnectionError("still gone")]

    class Restarting(RunStore):
        async def run_ids(self) -> list[str]:
            if outages:
                raise outages.pop()
            return await super().run_ids()

    store = Restarting(async_redis)
    await store.create(SPEC)
    looking = asyncio.create_task(Reconciler(store, lambda _: mesh, reconcile_s=0.01).run())
    await wait_until(lambda: mesh.prepared == 1 or looking.done())
    assert not looking.done()
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)


async def test_runs_that_are_over_cost_the_loop_no_look_and_leave_nothing_in_it(async_redis: Redis):
    looked: list[str] = []

    class Counting(RunStore):
        async def load(self, run_id: str) -> RunRecord:
            looked.append(run_id)
            return await super().load(run_id)

    store = Counting(async_redis)
    for run_id in ("over", "lake"):
        await store.create(replace(SPEC, run_id=run_id))
    await store.update("over", state=RunState.FINISHED)
    reconciler = Reconciler(store, lambda _: FakeMesh(), reconcile_s=0.01)
    looking = asyncio.create_task(reconciler.run())
    await wait_until(lambda: looked.count("lake") > 5)
    assert [key[0] for key in reconciler._meshes] == ["lake"]
    await store.want("lake", DesiredState.KILLED)
    await wait_until(lambda: not reconciler._meshes)
    assert "over" not in looked
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)


async def test_a_lost_record_is_not_said_to_be_of_no_run(store: RunStore, mesh: FakeMesh):
    """Who watches the run tries again until it is restored; a late write of a field changes nothing."""
    reconciler = Reconciler(store, lambda _: mesh)
    await reconciler.reconcile("lake")
    await store.redis.flushall()
    for late in ({}, {"beat": 1.0}):
        if late:
            await store.update("lake", **late)
        with pytest.raises(LostRecordError, match="lost the record of run 'lake'"):
            await store.load("lake")
        with pytest.raises(UnknownRunError):
            await store.load("another")
    assert await reconciler._active_runs() == ["lake"]
    assert (await store.load("lake")).run_id == "lake"
    await store.update("lake", state=RunState.FAILED)
    await store.delete("lake")
    with pytest.raises(UnknownRunError):
        await store.load("lake")


async def test_a_record_that_redis_has_lost_is_written_again(store: RunStore, mesh: FakeMesh):
    """It keeps its id, so that the run's parts continue; a deleted run does not come back."""
    reconciler = Reconciler(store, lambda _: mesh, reconcile_s=0.02)
    running = asyncio.create_task(reconciler.run())

    async def is_running() -> bool:
        try:
            return (await store.load("lake")).state is RunState.RUNNING
        except (LostRecordError, UnknownRunError):
            return False

    try:
        await wait_until(is_running)
        before = await store.load("lake")
        await store.redis.flushall()
        await wait_until(is_running)
        after = await store.load("lake")
        assert (after.uid, after.config, after.attempt) == (before.uid, before.config, before.attempt)
        assert await store.run_ids() == ["lake"]
        await store.update("lake", state=RunState.FAILED)
        await store.delete("lake")
        await asyncio.sleep(0.2)  # several passes
        assert await store.run_ids() == []
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
