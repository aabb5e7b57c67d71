"""A learner that resumes before acknowledged checkpoints: what newer weights left behind is given up with them."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.buffer.admin import release_all_workers
from offbeat.services.buffer.api import Proof
from offbeat.services.buffer.config import Order
from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.errors import RewoundError
from offbeat.services.keys import RunKeys
from offbeat.services.live_settings import encode_change
from offbeat.services.messages.types import EpisodeTask
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.publisher import RedisWeightPublisher
from offbeat.services.weights.subscriber import RedisWeightSubscriber
from offbeat.services.weights.transports.factory import cleanup
from tests.services.buffer.buffer_play import RUN, Run, limits, next_epoch, publish

KEYS = RunKeys(RUN)


@pytest.fixture
def config(tmp_path: Path) -> WeightsConfig:
    return WeightsConfig(transport="fs", url=str(tmp_path / "weights"))


@pytest.fixture
def played(redis: Redis, async_redis: AsyncRedis, config: WeightsConfig) -> Iterator[Run]:
    """A run with versions 0 to 4, two groups a step, of which the steps up to 4 are acknowledged."""
    run = Run.begin(redis, async_redis, limits(temperature=1.0), step=-1)
    with_weights(run, config, run.learner, range(5))
    redis.hset(f"{KEYS.key('buffer')}:ledger", mapping={"admitted": 8, "submitted": 8, "trained": 8, "next": 8})
    yield run
    cleanup(RUN, config, Path("unused"))


def with_weights(run: Run, config: WeightsConfig, learner: RedisLearnerBuffer, versions: range) -> None:
    publisher = RedisWeightPublisher(run.redis, RUN, config, learner.epoch, Path("unused"), known=learner._known)
    if versions.start == 0:
        learner.reconcile(Proof())
    for version in versions:
        publisher.publish(version, version, [("w", torch.full((4,), 10.0 * learner.epoch + version))])
    publisher.close()


def versions(redis: Redis) -> list[bytes]:
    return sorted(redis.hkeys(KEYS.manifests))  # type: ignore[arg-type]


def resume(run: Run, step: int, order: Order = "completion") -> RedisLearnerBuffer:
    learner = RedisLearnerBuffer(run.redis, RUN, next_epoch(run.redis), order=order)
    saved = [(s, [2 * s - 2, 2 * s - 1]) for s in range(1, step + 1)]
    learner.reconcile(Proof(saved=saved, step=step, num_trained=2 * step, next_number=2 * step))
    return learner


@pytest.mark.parametrize("files_stay", [True, False])
async def test_a_run_that_goes_back_samples_with_the_checkpoints_weights(
    played: Run, config: WeightsConfig, *, files_stay: bool
) -> None:
    if not files_stay:
        cleanup(RUN, config, Path("unused"))
    learner = resume(played, 2)
    assert learner.newest_version() == -1
    assert await played.buffer.claim("w", 100) == [], "engines may still have the discarded weights"
    with_weights(played, config, learner, range(2, 3))
    assert played.redis.hgetall(KEYS.progress) == {b"version": b"2", b"step": b"2"}
    assert versions(played.redis) == [b"2"]
    assert {task.min_version for task in await played.buffer.claim("w", 100)} == {2}
    again = resume(played, 2)
    assert again.newest_version() == 2, "nothing to give up is left"
    assert versions(played.redis) == [b"2"]


async def test_groups_that_discarded_weights_sampled_are_dropped(played: Run) -> None:
    await played.complete_groups(1)
    (_, *_) = await played.buffer.claim("w", 1)
    learner = resume(played, 2)
    counters = learner.counters()
    assert counters.dropped == {"rewound": 6}, "two steps of two groups, one complete and one played group"
    assert (counters.admitted, counters.trained, counters.in_flight) == (10, 4, 0)
    assert learner.take(0) is None
    assert played.keys_left("unit") == played.keys_left("blobs") == []


async def test_groups_of_older_weights_that_discarded_ones_finished_are_dropped(
    redis: Redis, async_redis: AsyncRedis
) -> None:
    """At a later step, the number of their tokens' version would be that of the new lineage's weights."""
    run = Run.begin(redis, async_redis, limits(temperature=1.0), step=2)
    redis.hset(f"{KEYS.key('buffer')}:ledger", mapping={"admitted": 4, "submitted": 4, "trained": 4, "next": 4})
    for task in await run.buffer.claim("w", 2):
        await run.submit(task, version=3)
    publish(redis, 3)
    redis.hincrby(f"{KEYS.key('buffer')}:ledger", "trained", 2)
    learner = resume(run, 2)
    assert learner.counters().dropped == {"rewound": 3}, "a step of two groups, and the complete one"
    assert learner.take(0) is None


async def test_rows_keep_the_order_of_their_admission(redis: Redis, async_redis: AsyncRedis) -> None:
    """A group that was admitted before the run went back has a version above those that follow."""
    run = Run.begin(redis, async_redis, limits(max_staleness=8.0), step=4)
    redis.hset(f"{KEYS.key('buffer')}:ledger", mapping={"admitted": 8, "submitted": 8, "trained": 8, "next": 8})
    earlier = await run.buffer.claim("w", 2)
    learner = resume(run, 2, "admission")
    later = await run.buffer.claim("w", 4)
    for task in later[:2]:
        await run.submit(task)
    assert [task.number for task in (*earlier, *later)] == [8, 8, 9, 9, 10, 10]
    assert learner.take(0) is None
    for task in earlier:
        await run.submit(task)
    assert [group.number for group in (learner.take(0), learner.take(0)) if group] == [8, 9]


async def test_a_learner_that_repeats_unacknowledged_steps_keeps_the_newest_version(
    redis: Redis, async_redis: AsyncRedis, config: WeightsConfig
) -> None:
    run = Run.begin(redis, async_redis, limits(temperature=1.0), step=-1)
    with_weights(run, config, run.learner, range(1))
    await run.complete_groups(4)
    with_weights(run, config, run.learner, range(1, 3))
    learner = resume(run, 0)
    with_weights(run, config, learner, range(1, 2))
    assert learner.newest_version() == 2
    assert versions(redis) == [b"1", b"2"]
    assert len([learner.take(0) for _ in range(4)]) == 4
    cleanup(RUN, config, Path("unused"))


async def test_a_run_whose_weights_are_gone_waits_for_none_of_them(
    redis: Redis, async_redis: AsyncRedis, config: WeightsConfig
) -> None:
    """Killed at version 8 with checkpoint 2, and cleaned up; its lower bound calls for groups that it has not trained."""
    run = Run.begin(redis, async_redis, limits(temperature=1.0, max_staleness=3.0), step=-1)
    with_weights(run, config, run.learner, range(9))
    redis.hset(f"{KEYS.key('buffer')}:ledger", mapping={"admitted": 4, "submitted": 4, "trained": 4, "next": 4})
    assert {task.min_version for task in await run.buffer.claim("w", 1)} == {8}
    cleanup(RUN, config, Path("unused"))
    release_all_workers(redis, RUN)
    run.reconfigure(temperature=1.0, max_staleness=1.0)
    learner = resume(run, 2, "admission")
    with_weights(run, config, learner, range(2, 3))
    tasks = await run.other_worker().claim("w", 100)
    assert {task.number for task in tasks} == {4, 5, 6, 7}, "admitted for the steps 2 and 3"
    assert {task.min_version for task in tasks} == {2}
    assert learner.newest_version() == 8, "engines that live have it"
    redis.rpush(KEYS.changes, encode_change({"max_staleness": 2.0}, 1000.0))
    assert [change.step for change in learner.adopt(2).changes] == [8], "repeated steps keep their settings"
    await submit(run, tasks, 5)
    assert learner.take(0) is None, "group 4 was admitted before"
    await submit(run, tasks, 4)
    assert [group.number for group in (learner.take(0), learner.take(0)) if group] == [4, 5]
    cleanup(RUN, config, Path("unused"))


async def test_versions_that_an_earlier_learner_had_published_are_discarded_too(
    redis: Redis, async_redis: AsyncRedis, config: WeightsConfig
) -> None:
    """A learner went on from checkpoint 2 after version 4 was lost; its checkpoint 4, without a version, is gone."""
    run = Run.begin(redis, async_redis, limits(temperature=1.0), step=-1)
    with_weights(run, config, run.learner, range(5))
    redis.hset(f"{KEYS.key('buffer')}:ledger", mapping={"admitted": 4, "submitted": 4, "trained": 4, "next": 4})
    await run.complete_groups(1)
    cleanup(RUN, config, Path("unused"))
    with_weights(run, config, resume(run, 2), range(2, 3))
    assert redis.hgetall(KEYS.progress) == {b"version": b"4", b"step": b"2"}
    redis.hincrby(f"{KEYS.key('buffer')}:ledger", "trained", 4)
    learner = resume(run, 2)
    assert learner.newest_version() == -1
    assert learner.take(0) is None, "its tokens are of version 4"
    cleanup(RUN, config, Path("unused"))


async def submit(run: Run, tasks: Sequence[EpisodeTask], number: int) -> None:
    for task in tasks:
        if task.number == number:
            await run.submit(task)


async def test_an_engine_with_discarded_weights_is_told(
    played: Run, config: WeightsConfig, async_redis: AsyncRedis
) -> None:
    subscriber = RedisWeightSubscriber(async_redis, RUN, config, Path("unused"))
    manifest = await subscriber.newest()
    assert manifest is not None
    async with subscriber.fetch(manifest):
        assert manifest.version == 4
    assert await subscriber.wait_newer(4, 0.05) is None
    with_weights(played, config, resume(played, 2), range(2, 3))
    with pytest.raises(RewoundError, match="version 4 did not survive: the run continues from version 2"):
        await subscriber.wait_newer(4, 30.0)
