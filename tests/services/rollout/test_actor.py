import gc
import json
from collections.abc import Iterator
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from offbeat.services.keys import RunKeys
from offbeat.services.rollout.actor import (
    LEAST_YOUNG_OBJECTS,
    MAX_LOAD_AGE_S,
    WaitStatusWriter,
    read_loads,
    tune_garbage_collector,
)
from offbeat.services.weights.replica_reports import ReplicaLoad, ReplicaReport, encode_report

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _collector_as_it_was() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


class Cycle:
    alive = 0

    def __init__(self) -> None:
        self.itself = self
        Cycle.alive += 1

    def __del__(self) -> None:
        Cycle.alive -= 1


@pytest.mark.parametrize("episodes", [16, 1024])
def test_garbage_is_found_before_it_is_more_than_the_episodes_hold(episodes: int) -> None:
    tune_garbage_collector(episodes)
    limit = max(LEAST_YOUNG_OBJECTS, 100 * episodes)
    num_alive = 0
    for _ in range(2 * limit):
        Cycle()
        num_alive = max(num_alive, Cycle.alive)
    freed = limit / 100  # objects freed meanwhile, of other threads too, are subtracted from those counted
    assert limit / 4 < num_alive <= limit + freed


def test_objects_existing_at_tuning_are_not_traversed_again() -> None:
    here = [[] for _ in range(100)]
    tune_garbage_collector(16)
    walked = {id(item) for item in gc.get_objects()}
    assert not any(id(item) in walked for item in here)


async def test_reports_of_all_nodes_have_the_time_of_redis(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as redis:
        before, _ = await redis.time()
        await WaitStatusWriter(redis, "clocks", "").show("w0", {"at": before - 60.0})
        after, _ = await redis.time()
        report = await cast(Any, redis.hget(RunKeys("clocks").doing, "w0"))
        assert before <= json.loads(report)["received"] <= after + 1


async def test_loads_are_of_replicas_that_reported_of_late_by_the_time_of_redis(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as redis:
        now, _ = await redis.time()
        load = ReplicaLoad(kv_usage=0.5, kv_tokens=64)
        reports = {
            "behind": ReplicaReport(3, now - 900.0, load, received=now),  # of a node whose clock is behind
            "dead": ReplicaReport(3, now + 900.0, load, received=now - MAX_LOAD_AGE_S - 1.0),
        }
        blobs = {name: encode_report(report) for name, report in reports.items()}
        await cast(Any, redis.hset(RunKeys("loads").served, mapping=blobs))
        loads = await read_loads(redis, "loads")
        assert {name: each.kv_usage for name, each in loads.items()} == {"behind": 0.5}
        await cast(Any, redis.hdel(RunKeys("loads").served, "behind"))
        assert await read_loads(redis, "loads") == {}
