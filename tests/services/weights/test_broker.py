"""The broker: unnamed files are deleted, named ones stay, lag is reported."""

import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis
import torch
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.keys import RunKeys
from offbeat.services.telemetry import AsyncRedisMetrics
from offbeat.services.weights import broker as service
from offbeat.services.weights.broker import UNANNOUNCED_TTL_S, WeightBroker
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.publisher import RedisWeightPublisher
from offbeat.services.weights.replica_reports import ReplicaReport, encode_report
from offbeat.services.weights.subscriber import RedisWeightSubscriber
from offbeat.services.weights.transports.base import StoredFile, file_name, owner_of
from offbeat.services.weights.transports.factory import cleanup
from tests.services.weights.publishing import give_lease
from tests.waiting import wait_until

RUN = "broker"
OWNER = owner_of(RUN, Path("unused"))


@pytest.fixture
def config(tmp_path: Path) -> WeightsConfig:
    return WeightsConfig(transport="fs", url=str(tmp_path))


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[AsyncRedis]:
    async with AsyncRedis.from_url(redis_url) as client:
        yield client


def files(folder: Path) -> set[Path]:
    return set(folder.iterdir())


def publish(redis_url: str, config: WeightsConfig, versions: int) -> None:
    with redis.Redis.from_url(redis_url) as server:
        give_lease(server, RUN, 1)
        publisher = RedisWeightPublisher(server, RUN, config, 1, Path("unused"))
        for version in range(versions):
            publisher.publish(version, version, [("w", torch.ones(1))])
        publisher.close()


async def test_old_files_that_no_manifest_names_are_collected(
    client: AsyncRedis, redis_url: str, config: WeightsConfig, tmp_path: Path
) -> None:
    publish(redis_url, config, 2)
    announced = files(tmp_path)
    dead, fresh, foreign = tmp_path / file_name(OWNER, 9, 0), tmp_path / file_name(OWNER, 10, 0), tmp_path / "foreign"
    for path in (dead, fresh, foreign, *announced):
        path.touch()
        os.utime(path, (0, 0))
    os.utime(fresh, None)
    broker = WeightBroker(client, RUN, config, Path("unused"))
    assert await broker.collect() == 1
    assert files(tmp_path) == announced | {fresh, foreign}
    broker = WeightBroker(client, RUN, config, Path("unused"), clock=lambda: time.time() + UNANNOUNCED_TTL_S + 1)
    assert await broker.collect() == 1
    assert files(tmp_path) == announced | {foreign}


async def test_a_version_outlasts_an_outage_that_delays_its_announcement(
    client: AsyncRedis, redis_url: str, config: WeightsConfig, tmp_path: Path
) -> None:
    """Its learner announces it when Redis accepts writes again; a successor stages anew."""
    publish(redis_url, config, 2)
    announced = files(tmp_path)
    staged, repeated = tmp_path / file_name(OWNER, 2, 1), tmp_path / file_name(OWNER, 1, 1)
    broker = WeightBroker(client, RUN, config, Path("unused"), clock=lambda: time.time() + UNANNOUNCED_TTL_S + 1)
    staged.touch()
    repeated.touch()
    assert await broker.collect() == 1
    assert files(tmp_path) == announced | {staged}
    for path in announced:
        path.unlink()
    repeated.touch()
    assert await broker.collect() == 0, "it is announced in place of the lost one"
    await client.set(RunKeys(RUN).epoch, 2)
    assert await broker.collect() == 2
    assert not files(tmp_path)


async def test_the_lag_of_every_living_replica_becomes_a_metric(
    client: AsyncRedis, redis_url: str, config: WeightsConfig
) -> None:
    subscriber = RedisWeightSubscriber(client, RUN, config, Path("unused"))
    broker = WeightBroker(client, RUN, config, Path("unused"))
    await subscriber.report("early", -1)
    assert await broker.measure() == {}
    publish(redis_url, config, 4)
    await subscriber.report("current", 3)
    await subscriber.report("behind", 1)
    await subscriber.retire("early")
    assert await broker.measure() == {"current": 0, "behind": 2}
    records = [record for _, record in await AsyncRedisMetrics(client, RUN).read()]
    assert {record.labels["replica"]: record.values["lag"].value for record in records} == {"current": 0, "behind": 2}


async def write_report(client: AsyncRedis, replica: str, *, age_s: float = 0.0, behind_s: float = 0.0) -> None:
    """behind_s: of the node's clock."""
    now_s, _ = cast(tuple[int, int], await client.time())
    report = encode_report(ReplicaReport(0, now_s - age_s - behind_s, received=now_s - age_s))
    await cast(Any, client).hset(RunKeys(RUN).served, replica, report)


async def test_a_silent_replica_is_forgotten(client: AsyncRedis, redis_url: str, config: WeightsConfig) -> None:
    publish(redis_url, config, 1)
    await write_report(client, "dead", age_s=60.0)
    assert await WeightBroker(client, RUN, config, Path("unused")).measure() == {}
    assert await client.exists(RunKeys(RUN).served) == 0


async def test_a_replica_on_a_node_whose_clock_is_behind_is_not_forgotten(
    client: AsyncRedis, redis_url: str, config: WeightsConfig
) -> None:
    publish(redis_url, config, 1)
    await write_report(client, "behind", behind_s=3600.0)
    assert await WeightBroker(client, RUN, config, Path("unused")).measure() == {"behind": 0}


async def test_a_broker_of_an_earlier_run_forgets_no_replica_of_the_new_one(
    client: AsyncRedis, redis_url: str, config: WeightsConfig
) -> None:
    publish(redis_url, config, 1)
    await write_report(client, "ours", age_s=60.0)
    await client.hset(RunKeys(RUN).record, "uid", "new")  # pyright: ignore[reportGeneralTypeIssues]
    late = WeightBroker(client, RUN, config, Path("unused"), run_uid="old")
    await late.measure()
    assert await client.hkeys(RunKeys(RUN).served) == [b"ours"]  # pyright: ignore[reportGeneralTypeIssues]


async def test_cleaning_up_removes_every_byte_of_the_run(
    client: AsyncRedis, redis_url: str, config: WeightsConfig, tmp_path: Path
) -> None:
    publish(redis_url, config, 3)
    assert cleanup(RUN, config, Path("unused")) == 2
    assert files(tmp_path) == set()
    assert await RedisWeightSubscriber(client, RUN, config, Path("unused")).newest() is None


async def test_a_large_version_is_not_collected_while_its_learner_hashes_it(
    client: AsyncRedis, config: WeightsConfig, tmp_path: Path
) -> None:
    written = tmp_path / (file_name(OWNER, 1, 1) + ".part")
    written.touch()
    hashed_for_s = 200.0  # of 150 GB, say
    os.utime(written, (time.time() - hashed_for_s, time.time() - hashed_for_s))
    assert await WeightBroker(client, RUN, config, Path("unused")).collect() == 0


async def test_a_hung_share_pauses_only_garbage_collection(
    client: AsyncRedis, config: WeightsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "CHECK_INTERVAL_S", 0.2)
    orphan, gate = tmp_path / file_name(OWNER, 1, 0), tmp_path / "gate"
    await client.set(RunKeys(RUN).epoch, 1)
    orphan.touch()
    os.utime(orphan, (0, 0))
    os.mkfifo(gate)
    broker, looks = WeightBroker(client, RUN, config, Path("unused")), 0
    transport = broker._transport
    assert transport is not None
    look = transport.stored

    def hanging() -> list[StoredFile]:
        nonlocal looks
        looks += 1
        gate.open("rb").close()
        return look()

    monkeypatch.setattr(transport, "stored", hanging)
    assert [await broker.collect() for _ in range(3)] == [0, 0, 0]
    assert looks == 1
    assert await broker.measure() == {}
    monkeypatch.setattr(transport, "stored", look)
    monkeypatch.setattr(service, "CHECK_INTERVAL_S", 60.0)
    gate.open("wb").close()
    await wait_until(lambda: broker._threads.num_hung == 0)
    assert await broker.collect() == 1
    assert not orphan.exists()
