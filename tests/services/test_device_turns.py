"""Turns of learner and engines on the same devices, over Redis, with processes that are killed."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from redis import Redis

from offbeat.services import device_turns
from offbeat.services.device_turns import EngineTurns, LearnerTurns
from offbeat.services.errors import FencedError
from offbeat.services.keys import RunKeys
from offbeat.services.redis.lease import LearnerLease
from tests.waiting import wait_until

KEYS = RunKeys("run")
LEASE_S = 6.0
"""Renewed four times as often, by a process that may not be scheduled for seconds."""
LEARNER = """
import sys, time
from redis import Redis
from offbeat.services.device_turns import LearnerTurns
from offbeat.services.redis.lease import LearnerLease
redis = Redis.from_url(sys.argv[1])
lease = LearnerLease(redis, "run", "victim", 3.0)
lease.acquire()
LearnerTurns(redis, "run", "", lease.epoch, 3.0).begin(lambda: False)
print("training", flush=True)
time.sleep(600)
"""
ENGINE = """
import asyncio, sys
from redis import Redis
from offbeat.services.device_turns import EngineTurns

class Engine:
    async def sleep(self): print("sleep", flush=True)
    async def wake(self): print("wake", flush=True)

async def main():
    turns = EngineTurns(Redis.from_url(sys.argv[1]), "run", "", "victim")
    await turns.acquire()
    print("awake", flush=True)
    await turns.take(Engine())

asyncio.run(main())
"""


class Engine:
    """Whether it sleeps, and how often it fell asleep."""

    def __init__(self) -> None:
        self.is_asleep = False
        self.num_sleeps = 0

    async def sleep(self) -> None:
        self.is_asleep = True
        self.num_sleeps += 1

    async def wake(self) -> None:
        self.is_asleep = False


@contextmanager
def a_process(script: str, redis_url: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen([sys.executable, "-c", script, redis_url], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


async def says(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return (await asyncio.to_thread(process.stdout.readline)).strip()


@asynccontextmanager
async def an_engine(redis: Redis, name: str = "engine") -> AsyncIterator[Engine]:
    """An engine that has its devices and takes turns."""
    turns, engine = EngineTurns(redis, "run", "", name), Engine()
    await turns.acquire()
    taking = asyncio.create_task(turns.take(engine))
    try:
        yield engine
    finally:
        taking.cancel()
        await turns.stop()


@contextmanager
def a_learner(redis: Redis, lease_s: float = LEASE_S) -> Iterator[LearnerTurns]:
    with LearnerLease(redis, "run", "learner", lease_s) as lease:
        lease.acquire(wait_s=30)
        yield LearnerTurns(redis, "run", "", lease.epoch, lease_s)


async def begin(learner: LearnerTurns) -> bool:
    return await asyncio.to_thread(learner.begin, lambda: False)


async def test_the_learner_begins_when_all_engines_sleep(redis: Redis) -> None:
    async with an_engine(redis, "a") as one, an_engine(redis, "b") as two:
        with a_learner(redis) as learner:
            for waits in (False, True, True):  # the second turn begins as soon as the first ends
                assert await begin(learner)
                assert (one.is_asleep, two.is_asleep) == (True, True)
                learner.end()
                if waits:
                    await wait_until(lambda: not one.is_asleep and not two.is_asleep)


async def test_an_engine_that_starts_in_a_turn_waits_for_its_end(redis: Redis) -> None:
    with a_learner(redis) as learner:
        assert await begin(learner), "no engine is there"
        turns = EngineTurns(redis, "run", "", "late")
        starting = asyncio.create_task(turns.acquire())
        await wait_until(lambda: redis.hexists(KEYS.sharing_engines, "late"))
        for _ in range(3):
            assert await begin(learner), "an engine that has not started does not hold the devices"
            assert not starting.done()
        learner.end()
        await starting
        await turns.stop()


async def test_an_engine_wakes_when_its_learner_is_killed(redis: Redis, redis_url: str) -> None:
    async with an_engine(redis) as engine:
        with a_process(LEARNER, redis_url) as learner:
            assert await says(learner) == "training"
            assert engine.is_asleep
            learner.send_signal(signal.SIGKILL)
            await wait_until(lambda: not engine.is_asleep)
        with a_learner(redis) as successor:
            assert await begin(successor)
            assert engine.is_asleep
            successor.end()


async def test_an_engine_sleeps_while_a_lease_may_still_be_renewed(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an outage of Redis longer than the lease."""
    monkeypatch.setattr("offbeat.services.redis.lease.RENEWALS_PER_TIMEOUT", 40)
    async with an_engine(redis) as engine:
        with a_learner(redis, lease_s=60.0) as learner:
            assert await begin(learner)
            redis.delete(KEYS.lease)
            await wait_until(lambda: bool(redis.exists(KEYS.lease)), every_s=0.001)
            assert engine.num_sleeps == 1
            assert engine.is_asleep
            learner.end()


async def test_a_killed_engine_delays_no_turn_for_long(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_turns, "DEAD_AFTER_S", 2.0)
    with a_learner(redis) as learner, a_process(ENGINE, redis_url) as victim:
        assert await says(victim) == "awake"
        assert await begin(learner)
        assert await says(victim) == "sleep"
        victim.kill()
        victim.wait()
        replacement = EngineTurns(redis, "run", "", "replacement")
        starting = asyncio.create_task(replacement.acquire())
        await wait_until(lambda: redis.hexists(KEYS.sharing_engines, "replacement"))
        assert not starting.done(), "it comes back in the learner's turn"
        learner.end()
        await starting
        taking = asyncio.create_task(replacement.take(Engine()))
        assert await begin(learner)
        assert not redis.hexists(KEYS.sharing_engines, "victim")
        learner.end()
        taking.cancel()
        await replacement.stop()


async def test_a_learner_that_lost_its_lease_gets_no_turn(redis: Redis) -> None:
    with a_learner(redis) as learner:
        redis.incr(KEYS.epoch)
        with pytest.raises(FencedError, match="another learner has taken the run"):
            await begin(learner)


async def test_a_learner_that_shall_stop_leaves_the_engines_awake(redis: Redis) -> None:
    async with an_engine(redis) as engine:
        turns = EngineTurns(redis, "run", "", "busy")
        await turns.acquire()  # and never sleeps
        with a_learner(redis) as learner:
            stopped = await asyncio.to_thread(learner.begin, lambda: engine.is_asleep)
            assert (stopped, learner.is_held) == (False, False)
            await wait_until(lambda: not engine.is_asleep)
        await turns.stop()
