"""A Redis that comes back without its last acknowledged writes: its file cut short, emptied, a replica that lagged."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.buffer.admin import configure_buffer
from offbeat.services.buffer.api import Proof, Reconciled
from offbeat.services.buffer.config import RedisConfig
from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.buffer.scripts import BufferKeys, BufferScripts
from offbeat.services.buffer.worker_client import AsyncRolloutBuffer
from offbeat.services.errors import FencedError, ReconcileError
from offbeat.services.keys import RunKeys
from offbeat.services.messages.types import EpisodeTask, Group
from offbeat.services.redis.connection import connect, connect_async
from offbeat.services.redis.incarnation import KnownIncarnation
from offbeat.services.redis.lease import LearnerLease, free_lease_of
from offbeat.services.redis.server import EmbeddedRedis
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.publisher import RedisWeightPublisher
from offbeat.trainer.learner.step_groups import StepGroups
from offbeat.trainer.learner.step_ledger import StepLedger, newest_epoch
from tests.services.buffer.buffer_play import RUN, limits, publish, trajectory_for
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

KEYS = RunKeys(RUN)
LIMITS = limits(max_staleness=4.0)
AOF = "appendonly.aof"


class Learner:
    """A learner's process, without its weights."""

    def __init__(self, url: str, folder: Path, step: int = 0) -> None:
        self.redis = connect(url, run_id=RUN)
        self.folder = folder
        self.known = KnownIncarnation(self.redis, RUN)
        self.lease = LearnerLease(self.redis, RUN, "me", 60.0, newest_epoch=lambda: newest_epoch(folder))
        self.journal = StepLedger(folder, self.lease.acquire(wait_s=10.0))
        self.journal.write_lease()
        self.step = self.durable = step
        self.results: list[Reconciled] = []
        self.buffer = RedisLearnerBuffer(
            self.redis, RUN, self.lease.epoch, known=self.known, limits=LIMITS, reclaim=self.lease.reclaim
        )
        self.buffer.prove_with(self.prove, self.results.append)
        self.begun = self.buffer.reconcile(self.prove())
        self.journal.write_resumed(step, self.begun.num_added, self.begun.incarnation)

    def prove(self) -> Proof:
        return self.journal.prove(self.durable, 2 * self.durable, 0)

    def train(self) -> list[Group]:
        """Take and train the groups of one step."""
        groups = [group for _ in range(2) if (group := self.buffer.take(0)) is not None]
        assert len(groups) == 2
        self.step += 1
        self.journal.write_step(self.step, StepGroups(groups=groups, trained=groups), max_staleness=4.0, skipped=False)
        return groups

    def die(self) -> None:
        self.lease.release()
        self.redis.close()


@dataclass
class World:
    """A run on an embedded Redis that can lose what it wrote since `copy`."""

    server: EmbeddedRedis
    folder: Path
    redis: Redis
    worker: AsyncRolloutBuffer
    clients: list[AsyncRedis] = field(default_factory=list[AsyncRedis])

    def learner(self, step: int = 0) -> Learner:
        return Learner(self.server.url, self.folder, step)

    def other_worker(self) -> AsyncRolloutBuffer:
        self.clients.append(connect_async(self.server.url, run_id=RUN))
        return AsyncRolloutBuffer(self.clients[-1], RUN)

    def copy(self) -> None:
        """Remember what Redis has written."""
        shutil.copy(self.server._folder / AOF, self.folder / "copy")

    async def lose(self) -> None:
        """Kill Redis; it comes back with what it had written at the time of the copy."""
        await asyncio.to_thread(self._lose)

    def _lose(self) -> None:
        self.server._end_process()
        shutil.copy(self.folder / "copy", self.server._folder / AOF)
        self.server.restart()

    async def submit(self, *tasks: EpisodeTask) -> None:
        for task in tasks:
            await self.worker.submit("w", task, trajectory_for(task))

    async def play(self, worker: AsyncRolloutBuffer, num_groups: int) -> list[int]:
        tasks = [task for _ in range(num_groups) for task in await worker.claim("w", 2)]
        for task in tasks:
            await worker.submit("w", task, trajectory_for(task))
        return sorted({task.number for task in tasks})

    def counters_add_up(self, learner: Learner) -> None:
        counters = learner.buffer.counters()
        gone = sum(counters.dropped.values()) + sum(counters.failed.values())
        assert counters.admitted == counters.trained + gone + counters.in_flight


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    # With everysec, a write during a sync of the disk is answered before it is in the file that `copy` reads.
    config = RedisConfig(appendfsync="always")
    with EmbeddedRedis(tmp_path / "redis", config) as server, connect(server.url) as redis:
        configure_buffer(redis, RUN, LIMITS)
        publish(redis, 0)
        client = connect_async(server.url, run_id=RUN)
        made = World(server, tmp_path, redis, AsyncRolloutBuffer(client, RUN), [client])
        yield made
        for each in made.clients:
            await each.aclose()


async def test_a_restart_without_losses_changes_nothing_but_the_incarnation(world: World):
    learner = world.learner()
    assert await world.play(world.worker, 2) == [0, 1]
    tasks = await world.worker.claim("w", 2)
    world.copy()
    await world.lose()
    with pytest.raises(ReconcileError):
        await world.worker.heartbeat("w")
    assert [group.number for group in learner.train()] == [0, 1]
    assert [(result.is_new, result.num_corrected) for result in learner.results] == [(True, 0)]
    assert (await world.worker.heartbeat("w")).cancelled == ()
    await world.submit(*tasks)
    assert learner.buffer.counters().submitted == 3
    learner.die()


async def test_an_episode_whose_submission_was_lost_is_played_again(world: World):
    learner = world.learner()
    tasks = await world.worker.claim("w", 2)
    world.copy()
    await world.submit(*tasks)
    await world.lose()
    assert learner.buffer.take(0) is None
    again = await world.worker.claim("w", 2)
    assert [(task.number, task.index, task.attempt) for task in again] == [(0, 1, 0), (0, 0, 0)] or again == tasks
    await world.submit(*again)
    group = learner.buffer.take(0)
    assert group is not None
    assert group.number == 0
    world.counters_add_up(learner)
    learner.die()


async def test_a_claim_that_was_lost_is_made_again_for_who_plays_it(world: World):
    learner = world.learner()
    first = await world.worker.claim("w", 1)
    world.copy()
    second = await world.worker.claim("w", 1)
    assert [task.number for task in (*first, *second)] == [0, 0]
    await world.lose()
    assert learner.buffer.take(0) is None
    assert (await world.worker.heartbeat("w")).cancelled == ()
    assert learner.buffer.snapshot().queued_train == 0
    await world.submit(*first, *second)
    assert learner.buffer.take(0) is not None
    learner.die()


async def test_episodes_of_a_lost_admission_are_cancelled_and_admitted_again(world: World):
    learner = world.learner()
    world.copy()
    tasks = await world.worker.claim("w", 2)
    await world.lose()
    assert learner.buffer.take(0) is None
    assert set((await world.worker.heartbeat("w")).cancelled) == set(tasks)
    assert await world.play(world.worker, 1) == [0]
    world.counters_add_up(learner)
    learner.die()


async def test_groups_of_every_checkpoint_are_never_delivered_again(world: World):
    """The lost acknowledgements cover older steps than those of the newest checkpoint."""
    learner = world.learner()
    await world.play(world.worker, 6)
    world.copy()
    for step in (1, 2):
        groups = learner.train()
        learner.durable = step
        assert learner.buffer.ack([group.entry_id for group in groups], step) == 2
    learner.die()
    await world.lose()
    assert free_lease_of(world.redis, RUN, "me"), "Redis has forgotten that it was released"
    successor = world.learner(step=2)
    assert successor.begun.num_corrected == 4
    assert [group.number for group in successor.train()] == [4, 5]
    counters = successor.buffer.counters()
    assert (counters.admitted, counters.trained, counters.in_flight) == (6, 4, 2)
    successor.die()


async def test_a_learner_that_lives_keeps_what_it_has_trained_since_its_checkpoint(world: World):
    learner = world.learner()
    world.copy()  # nothing was admitted
    await world.play(world.worker, 2)
    groups = learner.train()
    await world.lose()
    assert learner.buffer.take(0) is None
    assert await world.play(world.worker, 2) == [2, 3]
    assert [group.number for group in learner.train()] == [2, 3]
    learner.durable = 1
    assert learner.buffer.ack([group.entry_id for group in groups], 1) == 2
    world.counters_add_up(learner)
    learner.die()
    successor = world.learner(step=1)
    assert [group.number for group in successor.train()] == [2, 3]
    successor.die()


async def test_a_learner_that_lives_keeps_what_it_has_refilled(world: World):
    """What its steps have refilled is dropped with their checkpoint, whatever Redis remembers of it."""
    learner = world.learner()
    world.copy()  # nothing was admitted
    await world.play(world.worker, 3)
    refilled = learner.buffer.take(0)
    assert refilled is not None
    learner.buffer.refill(refilled, "no_signal", 1)
    groups = learner.train()
    await world.lose()
    assert learner.buffer.take(0) is None
    assert learner.buffer.counters().in_flight == 2
    assert world.redis.hkeys(f"{BufferKeys(RUN).root}:refilled") == [b"0"]
    learner.durable = 1
    assert learner.buffer.ack([group.entry_id for group in groups], 1) == 2
    counters = learner.buffer.counters()
    assert (counters.trained, counters.dropped, counters.in_flight) == (2, {"no_signal": 1}, 0)
    world.counters_add_up(learner)
    learner.die()


async def test_a_refilled_group_of_a_lost_acknowledgement_is_dropped_again(world: World):
    learner = world.learner()
    await world.play(world.worker, 3)
    refilled = learner.buffer.take(0)
    assert refilled is not None
    learner.buffer.refill(refilled, "no_signal", 1)
    groups = learner.train()
    world.copy()
    learner.durable = 1
    learner.buffer.ack([group.entry_id for group in groups], 1)
    await world.lose()
    assert learner.buffer.take(0) is None
    counters = learner.buffer.counters()
    assert (counters.trained, counters.dropped, counters.in_flight) == (2, {"no_signal": 1}, 0)
    learner.die()


async def test_what_was_trained_but_neither_saved_nor_remembered_is_dropped_as_lost(world: World):
    learner = world.learner()
    world.copy()
    await world.play(world.worker, 2)
    learner.train()
    await world.lose()
    learner.buffer.adopt(1)  # it continues, and dies before it can save
    learner.die()
    successor = world.learner()
    assert successor.buffer.take(0) is None
    assert successor.buffer.counters().dropped == {"lost": 2}
    assert await world.play(world.worker, 2) == [2, 3]
    successor.train()
    successor.die()


async def test_a_lost_version_is_announced_again_once_the_data_is_reconciled(world: World):
    learner = world.learner()
    weights = WeightsConfig(transport="fs", url=str(world.folder / "weights"))
    publisher = RedisWeightPublisher(
        learner.redis, RUN, weights, learner.lease.epoch, world.folder, known=learner.known
    )
    world.copy()
    publisher.publish(1, 1, [("w", torch.zeros(4))])
    await wait_until(lambda: publisher.newest() is not None)
    await world.lose()
    assert publisher.newest() is None
    publisher.publish(1, 1, [("w", torch.zeros(4))])
    await asyncio.to_thread(publisher.flush)
    assert publisher.newest() is None, "refused while the data is not reconciled"
    learner.buffer.reconcile_if_needed()
    publisher.publish(1, 1, [("w", torch.zeros(4))])
    await asyncio.to_thread(publisher.close)
    assert world.redis.hget(KEYS.progress, "version") == b"1"
    learner.die()


@pytest.mark.parametrize("paused", [0, 1])
async def test_an_emptied_redis_continues_with_the_live_learner(world: World, paused: int):
    """paused: set by the reconciler before the learner restores the limits."""
    learner = world.learner()
    await world.play(world.worker, 2)
    groups = learner.train()
    learner.durable = 1
    learner.buffer.ack([group.entry_id for group in groups], 1)
    held = await world.worker.claim("w", 2)
    world.redis.flushall()
    set_paused = BufferScripts(world.redis, RUN)
    set_paused("pause", paused)
    with pytest.raises(ReconcileError):
        await world.worker.claim("w", 2)
    assert learner.buffer.take(0) is None
    assert (world.redis.hget(BufferKeys(RUN).limits, "paused") == b"1") == bool(paused)
    set_paused("pause", 0)
    publish(world.redis, 1)
    assert set((await world.worker.heartbeat("w")).cancelled) == set(held)
    assert await world.play(world.worker, 2) == [2, 3]
    assert [group.number for group in learner.train()] == [2, 3]
    assert world.redis.get(KEYS.epoch) == str(learner.lease.epoch).encode()
    world.counters_add_up(learner)
    learner.die()


async def test_in_an_emptied_redis_a_paused_learner_stays_fenced(world: World):
    old = world.learner()
    await world.play(world.worker, 2)
    old.lease._stop.set()  # paused: it renews nothing
    assert old.lease._thread is not None
    old.lease._thread.join()
    world.redis.flushall()
    configure_buffer(world.redis, RUN, LIMITS)
    new = world.learner()
    assert new.lease.epoch > old.lease.epoch
    for write in (lambda: old.buffer.take(0), lambda: old.buffer.ack(["1-1"], 1), lambda: old.buffer.adopt(0)):
        with pytest.raises(FencedError):
            write()
    weights = WeightsConfig(transport="fs", url=str(world.folder / "weights"))
    publisher = RedisWeightPublisher(old.redis, RUN, weights, old.lease.epoch, world.folder, known=old.known)
    publisher.publish(0, 0, [("w", torch.zeros(4))])
    with pytest.raises(FencedError):
        publisher.close()
    new.buffer.adopt(0)
    new.die()


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path / "replica", RedisConfig(), password="") as server:
        yield server


def is_in_sync(replica: Redis) -> bool:
    return cast(dict[str, Any], replica.info("replication"))["master_link_status"] == "up"


async def test_a_replica_that_lagged_when_it_was_promoted_is_reconciled(tmp_path: Path, replica: EmbeddedRedis):
    with EmbeddedRedis(tmp_path / "primary", RedisConfig(), password="") as primary, connect(primary.url) as redis:
        configure_buffer(redis, RUN, LIMITS)
        publish(redis, 0)
        learner = Learner(primary.url, tmp_path)
        async with connect_async(primary.url, run_id=RUN) as client, connect_async(replica.url, run_id=RUN) as after:
            worker = AsyncRolloutBuffer(client, RUN)
            for task in [task for _ in range(2) for task in await worker.claim("w", 2)]:
                await worker.submit("w", task, trajectory_for(task))
            with connect(replica.url) as promoted:
                promoted.replicaof("127.0.0.1", primary.url.rpartition(":")[2].partition("/")[0])
                # WAIT also counts a replica that is still loading the primary's data.
                await wait_until(lambda: is_in_sync(promoted))
                promoted.replicaof("NO", "ONE")  # from here on it lags
            groups = learner.train()
            learner.durable = 1
            learner.buffer.ack([group.entry_id for group in groups], 1)
            learner.die()
            with connect(replica.url) as promoted:
                assert free_lease_of(promoted, RUN, "me")
            worker._redis = worker._run._redis = after
            with pytest.raises(ReconcileError):
                await worker.claim("w", 2)
            successor = Learner(replica.url, tmp_path, step=1)
            assert successor.begun.num_corrected == 2
            assert successor.buffer.take(0) is None, "nothing that was trained is delivered again"
            assert {task.number for task in await worker.claim("w", 2)} == {2}
            successor.die()
