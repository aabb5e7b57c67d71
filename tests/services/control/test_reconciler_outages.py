"""The reconciler while Redis is away or refuses writes."""

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from offbeat.services.buffer.config import RedisConfig
from offbeat.services.control.interfaces import Health
from offbeat.services.control.reconciler import Reconciler
from offbeat.services.control.run import (
    DesiredState,
    RunState,
)
from offbeat.services.control.store import RunStore
from offbeat.services.errors import RetryableError
from offbeat.services.redis.connection import connect_async
from offbeat.services.redis.server import EmbeddedRedis
from tests.services.control.control_fakes import SPEC, FakeMesh, reconcile_until
from tests.waiting import wait_until


async def test_a_component_silenced_by_a_read_only_redis_is_not_replaced(
    store: RunStore, mesh: FakeMesh, async_redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("offbeat.services.control.reconciler.OUTAGE_GRACE_S", 60.0)
    client = connect_async(redis_url, patience_s=0.05)
    reconciler = Reconciler(RunStore(client), lambda _: mesh, reconcile_s=0.02)
    running = asyncio.create_task(reconciler.run())
    try:
        await wait_until(lambda: mesh["learner"].starts == 1)
        await async_redis.config_set("maxmemory", "1")
        passes: list[None] = []
        observe = mesh["learner"].observe
        mesh["learner"].observe = lambda: passes.append(None) or observe()
        mesh["learner"].die("its host fell silent")
        await wait_until(lambda: len(passes) > 3)
        assert reconciler.redis_trouble.startswith("Redis refuses writes: OOM ")
        await async_redis.config_set("maxmemory", "0")
        passes.clear()
        await wait_until(lambda: len(passes) > 3)
        assert reconciler.redis_trouble == ""
        mesh["learner"].health = Health.READY
        passes.clear()
        await wait_until(lambda: len(passes) > 3)  # no pass that observed its death is left
        monkeypatch.setattr("offbeat.services.control.reconciler.OUTAGE_GRACE_S", 0.0)
        passes.clear()
        await wait_until(lambda: len(passes) > 3)
        assert mesh["learner"].starts == 1
        assert await store.components.restarts("lake") == {}
        mesh["learner"].die("really")
        await wait_until(lambda: mesh["learner"].starts == 2)
    finally:
        await async_redis.config_set("maxmemory", "0")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.aclose()


async def test_a_component_whose_heartbeats_another_redis_lacks_is_not_replaced(
    tmp_path: Path, mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
):
    """No command fails: each is repeated until the server is back."""
    monkeypatch.setattr("offbeat.services.control.reconciler.OUTAGE_GRACE_S", 60.0)
    with EmbeddedRedis(tmp_path, RedisConfig()) as server:
        client = connect_async(server.url)
        store = RunStore(client)
        await store.create(SPEC)
        reconciler = Reconciler(store, lambda _: mesh)
        assert await reconciler.reconcile("lake") is RunState.STARTING
        assert await reconciler.reconcile("lake") is RunState.RUNNING
        server.restart()
        mesh["learner"].die("its host fell silent")
        await reconciler.reconcile("lake")
        mesh["learner"].health = Health.READY
        monkeypatch.setattr("offbeat.services.control.reconciler.OUTAGE_GRACE_S", 0.0)
        await reconciler.reconcile("lake")
        assert mesh["learner"].starts == 1
        mesh["learner"].die("really")
        await reconciler.reconcile("lake")
        assert mesh["learner"].starts == 2
        await client.aclose()


async def test_a_component_that_an_emptied_redis_does_not_know_is_not_replaced(
    store: RunStore, mesh: FakeMesh, async_redis: Redis, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("offbeat.services.control.reconciler.OUTAGE_GRACE_S", 60.0)
    reconciler = Reconciler(store, lambda _: mesh, reconcile_s=0.02)
    await reconcile_until(reconciler, RunState.RUNNING)
    await async_redis.flushall()
    mesh["learner"].health = Health.ABSENT
    assert await reconciler._active_runs() == ["lake"]
    await reconciler.reconcile("lake")
    assert mesh["learner"].starts == 1


async def test_redis_trouble_is_reported_while_redis_refuses_writes(
    store: RunStore, mesh: FakeMesh, async_redis: Redis, redis_url: str
):
    """Also for a run that is ending."""
    client = connect_async(redis_url, patience_s=0.05)
    reconciler = Reconciler(RunStore(client), lambda _: mesh, reconcile_s=0.02)
    mesh["learner"].stops_at_once = False
    running = asyncio.create_task(reconciler.run())
    try:
        await wait_until(lambda: mesh["learner"].starts == 1)
        await store.want("lake", DesiredState.STOPPED)
        await wait_until(lambda: mesh["learner"].stops != [])
        await async_redis.config_set("maxmemory", "1")
        await wait_until(lambda: reconciler.redis_trouble.startswith("Redis refuses writes: OOM "))
        await async_redis.config_set("maxmemory", "0")
        await wait_until(lambda: reconciler.redis_trouble == "")
    finally:
        await async_redis.config_set("maxmemory", "0")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.aclose()


def redis_is_away() -> RetryableError:
    refusal = RetryableError("Redis refuses writes: OOM")
    refusal.__cause__ = ConnectionError("OOM")
    return refusal


async def test_a_preparation_that_fails_in_an_outage_is_retried(
    reconciler: Reconciler, store: RunStore, mesh: FakeMesh
):
    prepare, tries = mesh.prepare, []

    async def fails_ten_times() -> None:
        tries.append(None)
        if len(tries) <= 10:
            raise redis_is_away()
        await prepare()

    mesh.prepare = fails_ten_times
    for _ in range(10):
        with pytest.raises(RetryableError):
            await reconciler.reconcile("lake")
    await reconcile_until(reconciler, RunState.RUNNING)
    assert await store.components.restarts("lake") == {}


@pytest.mark.parametrize("missed_by_all", [True, False])
async def test_one_start_that_fails_in_an_outage_is_not_counted(
    reconciler: Reconciler,
    store: RunStore,
    mesh: FakeMesh,
    missed_by_all: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("offbeat.services.control.reconciler.OUTAGE_GRACE_S", 0.0)

    async def fails() -> None:
        if missed_by_all:
            reconciler._note_outage(ConnectionError("OOM"))
        raise redis_is_away()

    mesh["learner"].ensure = fails
    for _ in range(3):
        await reconciler.reconcile("lake")
    counted = {name: restarts.total for name, restarts in (await store.components.restarts("lake")).items()}
    assert counted == ({} if missed_by_all else {"learner": 2})
