"""What tests of the buffer share: small trajectories, limits, and a run with a learner to play with."""

from dataclasses import dataclass

import numpy as np
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.buffer.admin import BufferWatch, configure_buffer
from offbeat.services.buffer.api import BufferLimits, SubmitResult
from offbeat.services.buffer.config import Order
from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.buffer.scripts import BufferKeys
from offbeat.services.buffer.worker_client import AsyncRolloutBuffer
from offbeat.services.keys import RunKeys
from offbeat.services.messages.types import (
    EpisodeTask,
    Segment,
    StopReason,
    Trajectory,
    Turn,
    VersionSpan,
)

RUN = "run"


def limits(**changes: object) -> BufferLimits:
    """Limits of two groups of two a step, with `changes`."""
    values: dict[str, object] = {
        "group_size": 2,
        "redundancy": 0,
        "groups_per_step": 2,
        "max_staleness": 1.0,
        "max_groups_in_flight": 8,
        "total_groups": 100,
        "max_attempts": 3,
        "worker_timeout_s": 60.0,
        "stale_policy": "drop",
    }
    return BufferLimits(**(values | changes))  # type: ignore[arg-type]


def trajectory_for(
    task: EpisodeTask, *, version: int | None = None, length: int = 12, worker: str = "w", reward: float = 1.0
) -> Trajectory:
    """The answer to a task: its tag and seed follow from its number, its tokens are of `version` (its min_version)."""
    mask = np.zeros(length, dtype=np.bool_)
    mask[length // 2 :] = True
    span = VersionSpan(length // 2, length, task.min_version if version is None else version)
    segment = Segment(np.arange(length, dtype=np.int32), mask, np.where(mask, -0.25, 0.0).astype(np.float32), (span,))
    return Trajectory(
        group_id=task.group_id,
        index=task.index,
        attempt=task.attempt,
        tag="lake",
        seed=1000 + task.number,
        segments=(segment,),
        turns=(Turn(0, length // 2, length, reward),),
        stop_reason=StopReason.TERMINATED,
        metrics={"success": reward},
        worker_id=worker,
        baseline=task.is_baseline,
    )


def publish(redis: Redis, step: int, run_id: str = RUN) -> None:
    """What the weights publisher's script does to the buffer: progress grows, the doorbell rings."""
    keys = RunKeys(run_id)
    known = redis.hget(keys.progress, "step")
    if known is None or int(known) < step:  # type: ignore[arg-type]
        redis.hset(keys.progress, mapping={"version": step, "step": step})
    redis.xadd(keys.doorbell, {"e": "publish"}, maxlen=128)


def next_epoch(redis: Redis, run_id: str = RUN) -> int:
    """What a new lease does to the buffer."""
    return int(redis.incr(RunKeys(run_id).epoch))  # type: ignore[arg-type]


def run_uid(redis: Redis) -> str:
    """The uid that the run's record has; empty without a record."""
    uid = redis.hget(RunKeys(RUN).record, "uid")
    return uid.decode() if uid else ""  # type: ignore[union-attr]


@dataclass
class Run:
    """A configured run on a real Redis: one worker process `buffer`, one learner, one watch."""

    redis: Redis
    async_redis: AsyncRedis
    buffer: AsyncRolloutBuffer
    learner: RedisLearnerBuffer
    watch: BufferWatch

    @classmethod
    def begin(cls, redis: Redis, async_redis: AsyncRedis, chosen: BufferLimits | None = None, step: int = 0) -> "Run":
        """Configure, take the lease and publish weights `step` (negative: none)."""
        configure_buffer(redis, RUN, chosen or limits())
        learner = RedisLearnerBuffer(redis, RUN, next_epoch(redis))
        if step >= 0:
            publish(redis, step)
        worker = AsyncRolloutBuffer(async_redis, RUN, run_uid(redis))
        return cls(redis, async_redis, worker, learner, BufferWatch(async_redis, RUN))

    def reconfigure(self, **changes: object) -> None:
        configure_buffer(self.redis, RUN, limits(**changes))

    def other_worker(self) -> AsyncRolloutBuffer:
        """The buffer of another worker process."""
        return AsyncRolloutBuffer(self.async_redis, RUN, run_uid(self.redis))

    def next_learner(self, order: Order = "completion") -> RedisLearnerBuffer:
        """The learner that replaces the present one."""
        self.learner = RedisLearnerBuffer(self.redis, RUN, next_epoch(self.redis), order=order)
        return self.learner

    async def submit(self, task: EpisodeTask, worker: str = "w", *, version: int | None = None) -> SubmitResult:
        return await self.buffer.submit(worker, task, trajectory_for(task, version=version, worker=worker))

    async def complete_groups(self, num_groups: int) -> None:
        """Play `num_groups` whole groups without redundancy, in order."""
        size = int(self.redis.hget(BufferKeys(RUN).limits, "group_size"))  # type: ignore[arg-type]
        for _ in range(num_groups):
            for task in await self.buffer.claim("w", size):
                await self.submit(task)

    def silence(self, worker: str) -> None:
        """Make a worker look dead: it was never heard of since."""
        self.redis.zadd(f"{BufferKeys(RUN).root}:workers", {worker: -1e12})

    def overwrite_blob(self, number: int, index: int, blob: bytes) -> None:
        """Damage what a group's member has submitted."""
        self.redis.hset(f"{BufferKeys(RUN).root}:blobs:t:{number}", mapping={str(index): blob})

    def keys_left(self, part: str) -> list[str]:
        """The buffer's keys that start with `part`."""
        return sorted(key.decode() for key in self.redis.scan_iter(f"{BufferKeys(RUN).root}:{part}*"))
