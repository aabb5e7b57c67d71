"""The learner's loop in turns with an engine: the order of sleep, load, step, offload, wake and weights."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

from redis import Redis

from offbeat.services.device_turns import EngineTurns, LearnerTurns
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.replica import GenerationReplica
from offbeat.services.redis.lease import LearnerLease
from tests.fakes import FakeLearnerBuffer, Moments, make_group
from tests.services.generation.generation_fakes import FakeBroker, FakeEngine
from tests.trainer.learner.harness import GROUPS_PER_STEP, LearnerHarness, learner_config
from tests.waiting import wait_until

SHOWN = ("sleep", "publish", "offload", "wake", "weights", "sample", "load", "train", "save")
TURNS: dict[str, Any] = {
    "max_staleness": 0.0,
    "actor_infer": {"strategy_args": {"strategy_config": {"enable_sleep_mode": True}}},
}


class Mesh:
    """An engine that follows the learner's fake publisher and takes turns with it over a real Redis."""

    def __init__(self, redis: Redis, harness: LearnerHarness, moments: Moments) -> None:
        self.redis, self.harness, self.moments = redis, harness, moments
        self.broker, self.engine = FakeBroker(), FakeEngine()
        self.replica = GenerationReplica("r", self.engine, self.broker, GenerationConfig())
        self.turns = EngineTurns(redis, "run", "", "r")
        self.engine.note = moments.names.append

    async def run(self) -> bool:
        loop = asyncio.get_running_loop()
        await self.turns.acquire()
        tasks = [asyncio.create_task(self.replica.follow()), asyncio.create_task(self.turns.take(self.replica))]
        numbers = itertools.count()

        def play(buffer: FakeLearnerBuffer) -> None:
            """Sample a batch once the newest weights are served, as requests with `min_version` do."""
            version = max(self.harness.publisher.versions)
            asyncio.run_coroutine_threadsafe(self.serve(version), loop).result(60)
            buffer.stream += [make_group(next(numbers), version=version) for _ in range(GROUPS_PER_STEP)]

        self.harness.buffer.on_empty = play
        try:
            return await asyncio.to_thread(self.learn)
        finally:
            await wait_until(lambda: not self.engine.is_asleep)  # the learner has left
            for task in tasks:
                task.cancel()
            await self.turns.stop()

    async def serve(self, version: int) -> None:
        if self.replica.status()["version"] < version:
            await self.broker.publish(version)
        await wait_until(lambda: self.replica.status()["version"] >= version and not self.engine.is_asleep)
        self.moments.names.append(f"sample {version}")

    def learn(self) -> bool:
        with LearnerLease(self.redis, "run", "learner", 5.0) as lease:
            lease.acquire(wait_s=30)
            turns = LearnerTurns(self.redis, "run", "", lease.epoch, 5.0)
            turns.begin(lambda: False)  # before the policy is loaded
            learner, _ = self.harness.learner(self.moments, turns=turns)
            return learner.run()


async def test_engine_and_learner_take_turns(redis_url: str, tmp_path: Path) -> None:
    """Checkpoints are saved in the learner's turn; the engine loads each version once it is awake."""
    moments = Moments()
    harness = LearnerHarness(tmp_path, learner_config(max_steps=3, save_steps=2, **TURNS))
    with Redis.from_url(redis_url) as redis:
        assert await Mesh(redis, harness, moments).run()
    assert [name for name in moments.names if name.startswith(SHOWN)] == [
        *("sleep", "publish 0", "offload", "wake", "weights 0", "sample 0"),
        *("sleep", "load", "train 0", "publish 1", "offload", "wake", "weights 1", "sample 1"),
        *("sleep", "load", "train 1", "publish 2", "save", "offload", "wake", "weights 2", "sample 2"),
        *("sleep", "load", "train 2", "publish 3", "save", "offload", "wake"),
    ]
