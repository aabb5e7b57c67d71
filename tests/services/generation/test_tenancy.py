import asyncio
import json
from functools import partial
from pathlib import Path

import pytest
from redis.asyncio import Redis

from offbeat.services.generation import tenancy
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.tenancy import (
    APP,
    Tenancy,
    Tenant,
    find_tenants,
)
from offbeat.services.keys import RunKeys, claims_key
from offbeat.services.messages.types import GenerateRequest, Sampling
from offbeat.services.redis import connection
from offbeat.services.weights.config import WeightsConfig
from tests.services.generation.generation_fakes import FakeEngine
from tests.waiting import PATIENCE_S

WEIGHTS = '{"weights": {"transport": "fs", "url": "/weights"}, "max_steps": 3}'


async def record(async_redis: Redis, run_id: str, *, attempt: int = 1, config: str = WEIGHTS) -> None:
    fields = {"config": config, "output_dir": f"/runs/{run_id}", "created_at": "5.0", "attempt": str(attempt)}
    await async_redis.hset(RunKeys(run_id).record, mapping=fields)  # pyright: ignore[reportGeneralTypeIssues]


async def claim(async_redis: Redis, *run_ids: str) -> None:
    await async_redis.hset(claims_key(APP), "engines", " ".join(run_ids))  # pyright: ignore[reportGeneralTypeIssues]


async def test_nothing_is_served_before_a_run_claims_the_application(async_redis: Redis):
    await record(async_redis, "one")
    assert await find_tenants(async_redis, "engines") == []


async def test_runs_that_share_an_application_are_served_in_the_order_of_their_claims(async_redis: Redis):
    for run_id in ("one", "two"):
        await record(async_redis, run_id)
    await claim(async_redis, "two", "gone", "one")
    assert [tenant.run_id for tenant in await find_tenants(async_redis, "engines")] == ["two", "one"]


async def test_the_run_that_has_claimed_it_is_served_as_its_record_says(async_redis: Redis):
    await record(async_redis, "one")
    await claim(async_redis, "one")
    (tenant,) = await find_tenants(async_redis, "engines")
    assert (tenant.run_id, tenant.output_dir, tenant.weights.url) == ("one", Path("/runs/one"), "/weights")


async def test_a_run_that_is_started_anew_is_another_tenant(async_redis: Redis):
    await claim(async_redis, "one")
    await record(async_redis, "one")
    first = await find_tenants(async_redis, "engines")
    assert first == await find_tenants(async_redis, "engines")
    await record(async_redis, "one", attempt=2)
    assert first != await find_tenants(async_redis, "engines")


async def test_the_claim_of_a_forgotten_run_serves_no_run(async_redis: Redis):
    await claim(async_redis, "gone")
    assert await find_tenants(async_redis, "engines") == []


class Saltless:
    """An engine that nothing is asked of."""

    def salted(self, _: str) -> FakeEngine:
        return FakeEngine()

    async def release(self, salt: str) -> None:
        pass


async def test_a_turn_is_limited_by_its_run_and_not_by_the_application(async_redis: Redis, redis_url: str):
    limits = {"actor_infer": {"request_timeout_s": 0.01, "update_timeout_s": 9.0}}
    await record(async_redis, "one", config=json.dumps(json.loads(WEIGHTS) | limits))
    await claim(async_redis, "one")
    (served,) = await find_tenants(async_redis, "engines")
    tenancy = Tenancy(served, "r", Saltless(), GenerationConfig(), redis_url)  # type: ignore[arg-type]
    async with asyncio.timeout(PATIENCE_S):
        ((answer,),) = [part async for part in tenancy.replica.generate([GenerateRequest("a", (1,), Sampling())])]
    assert answer.error == "no answer within 0.01 s"
    await tenancy.end()


async def test_a_redis_that_has_gone_without_a_word_is_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(connection, "SOCKET_TIMEOUT_S", 0.1)
    monkeypatch.setattr(tenancy, "connect_async", partial(connection.connect_async, patience_s=0.2), raising=False)

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    held: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(silent, "127.0.0.1")
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    served = Tenant("one", Path("/runs/one"), WeightsConfig(transport="fs", url="/weights"))
    tenant = Tenancy(served, "r", Saltless(), GenerationConfig(), url)  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(60):
            await tenant.begin()
        assert "starting without weights: Redis does not answer" in caplog.text
        assert tenant.replica.status()["version"] < 0
    finally:
        async with asyncio.timeout(60):
            await tenant.end()
        for writer in held:
            writer.close()
        server.close()
