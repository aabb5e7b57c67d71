"""Reports of nodes whose clocks differ from Redis' and from the reader's."""

import json
from collections.abc import Mapping
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from offbeat.services.control.component_store import ComponentStore
from offbeat.services.control.explain_episodes import count_waits
from offbeat.services.control.failing_episodes import FailingEpisodes
from offbeat.services.keys import RunKeys
from offbeat.services.weights.replica_reports import FetchState, ReplicaLoad, ReplicaReport, encode_report

NOW = 10_000.0
"""Of the reader's clock."""
KEYS = RunKeys("lake")


@pytest.fixture
async def store(async_redis: Redis) -> ComponentStore:
    return ComponentStore(async_redis, lambda: NOW)


async def write(redis: Redis, key: str, report: bytes) -> None:
    await cast(Any, redis).hset(key, "one", report)


async def redis_time(redis: Redis) -> float:
    now_s, now_us = cast(tuple[int, int], await redis.time())
    return now_s + now_us / 1e6


@pytest.mark.parametrize("node", [NOW - 600.0, NOW, NOW + 600.0])
async def test_workers_count_whatever_the_clock_of_their_node(
    store: ComponentStore, async_redis: Redis, node: float
) -> None:
    episodes: Mapping[str, Any] = {"finished": 0, "failed": 16, "recent": 16, "recent_failed": 16, "limit": 16}
    report = {"at": node, "groups": {"3": {"env": [2, node - 7.0]}}, "evaluations": {}, "episodes": episodes}
    report["received"] = await redis_time(async_redis)
    await write(async_redis, KEYS.doing, json.dumps(report).encode())
    workers = (await store.reports("lake")).workers
    age_s = await redis_time(async_redis) - report["received"]
    assert FailingEpisodes.of(workers.values(), since=NOW - 5.0 - age_s).all_failed
    assert not FailingEpisodes.of(workers.values(), since=NOW + 5.0).all_failed
    assert count_waits(workers.values(), "groups", "3", NOW) == {"env": (2, pytest.approx(NOW - 7.0, abs=0.1 + age_s))}


async def test_replicas_have_times_of_the_readers_clock(store: ComponentStore, async_redis: Redis) -> None:
    node = NOW - 600.0
    load = ReplicaLoad(3, 3, loading=5, loading_since=node - 1.0)
    report = ReplicaReport(4, node, load, fetching=FetchState(5, node - 40.0, "fs:/nfs"))
    await write(async_redis, KEYS.served, encode_report(report))
    assert (await store.reports("lake")).replicas == {"one": report}, "an older replica's"
    received = await redis_time(async_redis)
    shown = ReplicaReport(4, node, load, fetching=report.fetching, received=received)
    await write(async_redis, KEYS.served, encode_report(shown))
    seen = (await store.reports("lake")).replicas["one"]
    age_s = await redis_time(async_redis) - received
    assert seen.fetching is not None
    times = [NOW - seen.at, NOW - seen.load.loading_since, NOW - seen.fetching.since]
    assert times == pytest.approx([0.0, 1.0, 40.0], abs=0.1 + age_s)
