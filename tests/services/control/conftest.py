"""The REST API on a fake mesh, and a reconciler of one run on it."""

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from offbeat.services.control.reconciler import Reconciler
from offbeat.services.control.restart_policy import RestartPolicy
from offbeat.services.control.store import RunStore
from tests.services.control.api_harness import (
    ApiHarness,
    api_harness,
)
from tests.services.control.control_fakes import SPEC, FakeClock, FakeMesh


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def mesh() -> FakeMesh:
    return FakeMesh()


@pytest.fixture
async def store(async_redis: Redis, clock: FakeClock) -> RunStore:
    store = RunStore(async_redis, clock)
    await store.create(SPEC)
    return store


@pytest.fixture
def reconciler(store: RunStore, mesh: FakeMesh) -> Reconciler:
    return Reconciler(store, lambda _: mesh, policy=RestartPolicy(max_restarts=3, backoff_s=1.0))


@pytest.fixture
async def api(redis_url: str) -> AsyncIterator[ApiHarness]:
    async with api_harness(redis_url) as made:
        yield made
