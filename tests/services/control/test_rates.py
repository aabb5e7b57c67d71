"""Rates over the last seconds: of all records, by Redis' clock, each decoded once."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from offbeat.services.control import rates as module
from offbeat.services.control.rates import WINDOW_S, RunRates
from offbeat.services.control.run import LearnerReport, RunRecord, RunSpec
from offbeat.services.control.store import RunStore
from offbeat.services.errors import CodecError
from offbeat.services.keys import RunKeys
from offbeat.services.telemetry import MetricRecord, Partial, decode_record, encode_record
from tests.services.control.control_fakes import SETTINGS, FakeClock

METRICS = RunKeys("lake").metrics
PLAYED = encode_record(MetricRecord("rollout", {"episodes": Partial("sum", 1.0)}))
IDLE = encode_record(MetricRecord("generation", {"tokens": Partial("sum", 0.0), "running": Partial("last", 0.0)}))


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[RunStore]:
    async with Redis.from_url(redis_url) as client:
        store = RunStore(client, FakeClock())
        await store.create(RunSpec("lake", "{}", "/tmp/lake", 3, SETTINGS))
        yield store


async def trajectories(rates: RunRates, record: RunRecord) -> float:
    """Return the rate's sum over the window."""
    view = await rates.view(record, LearnerReport(), 0.0, can_train=True)
    assert view.trajectories is not None
    return round(view.trajectories * WINDOW_S, 6)


async def append(store: RunStore, *records: bytes) -> None:
    async with store.redis.pipeline(transaction=False) as pipe:
        for record in records:
            pipe.xadd(METRICS, {"r": record})
        await pipe.execute()


async def test_each_record_is_decoded_once_however_many_views(store: RunStore, monkeypatch: pytest.MonkeyPatch):
    """5,000 records in the window are those of some 300 replicas and workers."""
    decoded: list[bytes] = []

    def decode(encoded: bytes) -> MetricRecord:
        decoded.append(encoded)
        return decode_record(encoded)

    monkeypatch.setattr(module, "decode_record", decode)
    rates, record = RunRates(store.components), await store.load("lake")
    await append(store, *[PLAYED, IDLE] * 2500)
    assert await asyncio.gather(*(trajectories(rates, record) for _ in range(3))) == [2500.0] * 3
    assert len(decoded) == 5000
    await append(store, PLAYED)
    assert await trajectories(rates, record) == 2501.0
    assert len(decoded) == 5001


@pytest.mark.parametrize("ahead_s", [0, 3600])
async def test_the_window_is_by_the_clock_of_redis(store: RunStore, ahead_s: int):
    """Whatever the clock of this host, and after a clock that was an hour ahead has been set right."""
    began_s = (await store.redis.time())[0]
    now_s = began_s + ahead_s
    for age_s in range(100, 0, -1):
        await store.redis.xadd(METRICS, {"r": PLAYED}, id=f"{(now_s - age_s) * 1000}-0")
    rates, record = RunRates(store.components), await store.load("lake")
    found = await trajectories(rates, record)
    waited_s = (await store.redis.time())[0] - began_s
    assert WINDOW_S - 1 - waited_s <= found <= WINDOW_S + 1


async def test_records_leave_the_window(store: RunStore):
    rates, record = RunRates(store.components), await store.load("lake")
    await append(store, PLAYED)
    assert await trajectories(rates, record) == 1.0
    newest_ms = int((await store.redis.xrevrange(METRICS, count=1))[0][0].partition(b"-")[0])
    await store.redis.xadd(METRICS, {"r": PLAYED}, id=f"{newest_ms + int(WINDOW_S * 1000)}-0")
    assert await trajectories(rates, record) == 2.0, "it is as old as the window"
    await store.redis.xadd(METRICS, {"r": PLAYED}, id=f"{newest_ms + int(WINDOW_S * 1000) + 1}-0")
    assert await trajectories(rates, record) == 2.0


async def test_a_restored_redis_is_read_anew(store: RunStore):
    rates, record = RunRates(store.components), await store.load("lake")
    now_ms = (await store.redis.time())[0] * 1000
    await store.redis.xadd(METRICS, {"r": PLAYED}, id=f"{now_ms + 60_000}-5")
    assert await trajectories(rates, record) == 1.0
    await store.redis.delete(METRICS)
    await append(store, PLAYED, PLAYED)
    assert await trajectories(rates, record) == 2.0


async def test_a_record_of_another_version_is_reported_by_each_view(store: RunStore):
    rates, record = RunRates(store.components), await store.load("lake")
    await append(store, PLAYED, b"\xc1")
    for _ in range(2):
        with pytest.raises(CodecError):
            await trajectories(rates, record)
