"""A learner that was cut off and comes back to a run that was created anew under its name is refused all that it asks."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import torch
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.buffer.admin import configure_buffer
from offbeat.services.buffer.api import Proof
from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.control.run import RunSpec, RunState
from offbeat.services.control.store import EPOCH_TTL_S, RunStore
from offbeat.services.errors import FencedError
from offbeat.services.keys import RunKeys
from offbeat.services.redis.incarnation import KnownIncarnation
from offbeat.services.redis.lease import LearnerLease
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.publisher import RedisWeightPublisher
from tests.services.buffer.buffer_play import RUN, limits
from tests.services.control.control_fakes import SETTINGS
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

KEYS = RunKeys(RUN)
SPEC = RunSpec(RUN, "{}", "/tmp/run", 3, SETTINGS)


@dataclass
class Learner:
    """All that a learner writes with."""

    lease: LearnerLease
    known: KnownIncarnation
    buffer: RedisLearnerBuffer
    publisher: RedisWeightPublisher

    @classmethod
    def start(cls, redis: Redis, folder: Path) -> "Learner":
        uid = uid_of(redis)
        lease = LearnerLease(redis, RUN, "me", 2.0, run_uid=uid)
        known = KnownIncarnation(redis, RUN, uid)
        epoch = lease.acquire()
        weights = WeightsConfig(transport="fs", url=str(folder))
        publisher = RedisWeightPublisher(redis, RUN, weights, epoch, folder, known=known)
        return cls(lease, known, RedisLearnerBuffer(redis, RUN, epoch, known=known), publisher)

    def publish(self, version: int) -> None:
        self.publisher.publish(version, version, [("w", torch.zeros(4))])
        self.publisher.close()

    async def refused(self) -> None:
        """Nothing of it is taken any more, and it hears so by its lease too."""
        for call in (
            lambda: self.buffer.take(0),
            lambda: self.buffer.ack(["1-1"], 1),
            lambda: self.buffer.reconcile(Proof()),
            lambda: self.publish(7),
        ):
            with pytest.raises(FencedError):
                call()

        def has_heard() -> bool:  # a lease that was not renewed for a stall has expired, too
            try:
                self.lease.check()
            except FencedError as error:
                return "another learner has taken the run" in str(error)
            return False

        await wait_until(has_heard)
        assert not self.lease.held()


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[RunStore]:
    async with AsyncRedis.from_url(redis_url) as client:
        yield RunStore(client)


async def make_anew(store: RunStore, redis: Redis, *, delete: bool) -> None:
    await store.update(RUN, state=RunState.FAILED)
    if delete:
        await store.delete(RUN)
    await store.create(SPEC)
    configure_buffer(redis, RUN, limits(), uid_of(redis))


def uid_of(redis: Redis) -> str:
    return cast(bytes, redis.hget(KEYS.record, "uid")).decode()


@pytest.mark.parametrize("delete", [False, True], ids=["created anew", "deleted first"])
@pytest.mark.parametrize("when", ["before the new lease", "under the new lease", "after the new lease"])
async def test_a_learner_of_the_run_before_is_fenced(
    store: RunStore, redis: Redis, tmp_path: Path, delete: bool, when: str
):
    await store.create(SPEC)
    configure_buffer(redis, RUN, limits(), uid_of(redis))
    old = Learner.start(redis, tmp_path)
    await make_anew(store, redis, delete=delete)
    with old.lease:
        if when == "before the new lease":
            await old.refused()
        new = Learner.start(redis, tmp_path)
        with new.lease:
            assert new.lease.epoch > old.lease.epoch
            if when == "under the new lease":
                await old.refused()
            new.buffer.take(0)
            new.publish(0)
        if when == "after the new lease":
            await old.refused()
        assert redis.hgetall(KEYS.progress) == {b"version": b"0", b"step": b"0"}
    assert redis.get(KEYS.lease) is None
    assert redis.ttl(KEYS.epoch) == -1, "the epoch of a run that continues does not expire"


async def test_a_learner_of_a_deleted_run_is_fenced_and_writes_no_key_of_it(
    store: RunStore, redis: Redis, tmp_path: Path
):
    await store.create(SPEC)
    old = Learner.start(redis, tmp_path)
    await store.update(RUN, state=RunState.FAILED)
    await store.delete(RUN)
    with old.lease:
        await old.refused()
    assert redis.keys(f"{KEYS.prefix}*") == [KEYS.epoch.encode()]
    assert EPOCH_TTL_S - 600 < cast(int, redis.ttl(KEYS.epoch)) <= EPOCH_TTL_S
