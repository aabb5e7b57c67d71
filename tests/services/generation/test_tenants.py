import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from redis.asyncio import Redis

from offbeat.services.errors import GenerationError, RewoundError
from offbeat.services.generation.config import EngineStrategy, GenerationConfig, VllmConfig
from offbeat.services.generation.tenancy import APP
from offbeat.services.generation.tenants import Tenants
from offbeat.services.keys import RunKeys, claims_key
from offbeat.services.weights.replica_reports import decode_report
from tests.services.generation.generation_fakes import FakeEngine
from tests.services.generation.test_tenancy import record
from tests.waiting import PATIENCE_S, wait_until


class Engine(FakeEngine):
    """An engine whose runs are noted."""

    def __init__(self) -> None:
        super().__init__()
        self.salts: list[str] = []
        self.released: list[str] = []
        self.may_release = asyncio.Event()
        self.may_release.set()

    def salted(self, salt: str) -> FakeEngine:
        self.salts.append(salt)
        return FakeEngine()

    async def release(self, salt: str) -> None:
        await self.may_release.wait()
        self.released.append(salt)


class FailingEngine(Engine):
    def salted(self, salt: str) -> FakeEngine:
        raise ValueError(f"no engine for {salt}")


def strategy_of(max_runs: int) -> GenerationConfig:
    strategy = EngineStrategy(strategy_config=VllmConfig(max_lora_rank=4, max_loras=max_runs))
    return GenerationConfig(strategy_args=strategy)


async def claim(redis: Redis, *run_ids: str) -> None:
    for run_id in run_ids:
        await record(redis, run_id)
    await redis.hset(claims_key(APP), "engines", " ".join(run_ids))  # pyright: ignore[reportGeneralTypeIssues]


async def is_reported(redis: Redis, run_id: str) -> bool:
    return bool(await redis.hlen(RunKeys(run_id).served))  # pyright: ignore[reportGeneralTypeIssues]


@asynccontextmanager
async def tenants_of(redis: Redis, url: str, engine: Engine, max_runs: int) -> AsyncIterator[Tenants]:
    tenants = Tenants("engines", "r", engine, strategy_of(max_runs), url)
    following = asyncio.create_task(tenants.follow(redis))
    try:
        yield tenants
    finally:
        await redis.delete(claims_key(APP))
        await wait_until(lambda: following.done() or not tenants.statuses())
        await wait_until(lambda: following.done() or len(engine.released) == len(engine.salts))
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following


async def test_runs_come_and_go_without_disturbing_another_one(async_redis: Redis, redis_url: str):
    engine = Engine()
    async with tenants_of(async_redis, redis_url, engine, 2) as tenants:
        await claim(async_redis, "one", "two")
        one, two = await tenants.find("one"), await tenants.find("two")
        assert one.replica is not two.replica
        with pytest.raises(GenerationError, match="serves 2 runs: the call must name one"):
            await tenants.find("")
        await claim(async_redis, "two", "three")
        three = await tenants.find("three")
        await wait_until(lambda: engine.released == engine.salts[:1])
        assert set(tenants.statuses()) == {"two", "three"}
        assert await tenants.find("two") is two
        await record(async_redis, "two", attempt=2)
        await wait_until(lambda: engine.released == engine.salts[:2])
        assert (await tenants.find("two")).tenant.start == "5.0/2"
        assert await tenants.find("three") is three
        await wait_until(lambda: is_reported(async_redis, "three"))


async def test_a_run_that_went_back_begins_anew_without_disturbing_another_one(async_redis: Redis, redis_url: str):
    engine = Engine()

    async def meet_an_earlier_version(*_: object) -> None:
        raise RewoundError("version 4 did not survive: the run continues from version 2")

    async with tenants_of(async_redis, redis_url, engine, 2) as tenants:
        await claim(async_redis, "one", "two")
        one, two = await tenants.find("one"), await tenants.find("two")
        one._subscriber.wait_newer = meet_an_earlier_version
        one._tasks.append(asyncio.create_task(one.replica.follow()))  # as if the next announcement came
        await wait_until(lambda: one.has_rewound)
        await tenants.check()
        await wait_until(lambda: engine.released == engine.salts[:1])
        assert await tenants.find("one") is not one
        assert await tenants.find("two") is two
        await tenants.check()


async def test_no_more_runs_are_served_than_there_is_room(async_redis: Redis, redis_url: str):
    """A run waits until the one whose place it takes has left the engine."""
    engine = Engine()
    async with tenants_of(async_redis, redis_url, engine, 1) as tenants:
        await claim(async_redis, "one", "two")
        assert (await tenants.find("")).tenant.run_id == "one"
        engine.may_release.clear()
        await claim(async_redis, "two")
        await wait_until(lambda: not tenants.statuses())
        assert len(engine.salts) == 1
        engine.may_release.set()
        assert (await tenants.find("")).tenant.run_id == "two"
        assert engine.released == engine.salts[:1]


async def test_a_run_whose_weights_can_not_be_reached_disturbs_no_other_one(async_redis: Redis, redis_url: str):
    """Its engine lacks the package of the store, say; the run is told why."""
    engine = Engine()
    async with tenants_of(async_redis, redis_url, engine, 2) as tenants:
        await claim(async_redis, "one", "two")
        await record(async_redis, "two", config='{"weights": {"transport": "fs", "url": "s4://x"}}')
        one = await tenants.find("one")
        await wait_until(lambda: is_reported(async_redis, "two"))
        await tenants.check()
        (report,) = (await async_redis.hgetall(RunKeys("two").served)).values()  # pyright: ignore[reportGeneralTypeIssues]
        assert "weights.url 's4://x' cannot be used" in decode_report(report).load.refused
        assert set(tenants.statuses()) == {"one"}
        await claim(async_redis, "one", "three")  # in the place of the run that was never served
        await tenants.find("three")
        assert await tenants.find("one") is one
        await tenants.check()


async def test_a_run_is_served_once_its_weights_can_be_reached(
    async_redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    """A store may refuse a connection for a while."""
    monkeypatch.setattr("offbeat.services.generation.tenants.RETRY_INTERVAL_S", 0.01)
    refusals = iter([OSError("no route to the store")] * 2)

    class Flaky(MemoryFileSystem):
        cachable = False

        def __init__(self) -> None:
            super().__init__()
            if error := next(refusals, None):
                raise error

    fsspec.register_implementation("flaky", Flaky, clobber=True)
    async with tenants_of(async_redis, redis_url, Engine(), 2) as tenants:
        await claim(async_redis, "one")
        await record(async_redis, "one", config='{"weights": {"transport": "fs", "url": "flaky://x"}}')
        await tenants.find("one")
        await tenants.check()


async def test_a_new_replica_is_ready_after_its_runs_have_begun(async_redis: Redis, redis_url: str):
    """And one whose run fails to begin is ready all the same: its health check asks for another one."""
    engine = Engine()
    tenants = Tenants("engines", "r", engine, strategy_of(2), redis_url)
    await claim(async_redis, "one", "two")
    await tenants.begin(async_redis)
    assert set(tenants.statuses()) == {"one", "two"}
    following = asyncio.create_task(tenants.follow(async_redis))
    await async_redis.delete(claims_key(APP))
    await wait_until(lambda: len(engine.released) == 2)
    following.cancel()

    failing = Tenants("engines", "s", FailingEngine(), strategy_of(2), redis_url)
    await claim(async_redis, "one")
    async with asyncio.timeout(PATIENCE_S):
        await failing.begin(async_redis)
    with pytest.raises(ValueError, match="no engine"):
        await failing.check()
