"""A run on an embedded Redis, with the real buffer, ledgers and checkpoints, and tokens and weights that cost nothing."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from redis import Redis

from offbeat.deploy.config.loader import dump_yaml, load_run
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.run_folder import Endpoints, locked, make_private, write_config, write_endpoints
from offbeat.deploy.run_marker import mark
from offbeat.deploy.run_setup import prepare_buffer, run_spec
from offbeat.services.buffer.config import RedisConfig
from offbeat.services.buffer.group_ledger import LedgerThread
from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.buffer.worker_client import AsyncRolloutBuffer
from offbeat.services.control.store import RunStore
from offbeat.services.messages.types import Group
from offbeat.services.redis.connection import connect, connect_async
from offbeat.services.redis.incarnation import KnownIncarnation
from offbeat.services.redis.lease import LearnerLease
from offbeat.services.redis.server import EmbeddedRedis
from offbeat.trainer.learner.step_groups import StepGroups
from offbeat.trainer.learner.step_ledger import StepLedger, newest_epoch
from offbeat.trainer.training.checkpoint import LearnerState, last_written
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from tests.paths import QUICKSTART
from tests.services.buffer.buffer_play import publish, trajectory_for

RUN = "busy"
GROUPS_PER_STEP, GROUP_SIZE, SAVE_STEPS = 2, 2, 2
WEIGHTS = b"weights" * 20_000


def busy_config(folder: Path) -> RunConfig:
    overrides = ["exp_name=busy", f"output_dir={folder}", "rollout_batch_size=4", "train_env_manager.group_size=2"]
    return load_run(
        QUICKSTART, [*overrides, "train_env_manager.num_env_groups=8", "max_steps=10000", "max_staleness=4"]
    )


class BusyLearner:
    """A learner's writes to Redis and disk; it keeps one checkpoint, so that older ones vanish all the time."""

    def __init__(self, url: str, folder: Path, uid: str) -> None:
        self.redis = connect(url, run_id=RUN)
        self._lease = lease = LearnerLease(
            self.redis, RUN, "me", 60.0, run_uid=uid, newest_epoch=lambda: newest_epoch(folder)
        )
        epoch = lease.acquire(wait_s=10.0)
        newest = last_written(folder / "checkpoints")
        self.step = self.durable = newest.step if newest else 0
        self.journal = StepLedger(folder, epoch)
        self.checkpoints = CheckpointStore(folder / "checkpoints", 1, epoch)
        known = KnownIncarnation(self.redis, RUN, uid)
        self.buffer = RedisLearnerBuffer(self.redis, RUN, epoch, known=known, reclaim=lease.reclaim)
        self.begun = self.buffer.reconcile(self.journal.prove(self.step, GROUPS_PER_STEP * self.step, 0))
        self.journal.write_resumed(self.step, self.begun.num_added, self.begun.incarnation)
        self._unsaved: list[str] = []

    def close(self) -> None:
        """End as a killed learner does, that Redis stays as it is: the lease's thread would outlive the test."""
        self._lease._stop.set()

    def take(self) -> list[Group]:
        """Return the next step's groups; nothing before they are complete."""
        if self.buffer.snapshot().ready < GROUPS_PER_STEP:
            return []
        groups = [group for _ in range(GROUPS_PER_STEP) if (group := self.buffer.take(5.0)) is not None]
        assert len(groups) == GROUPS_PER_STEP
        return groups

    def train(self) -> list[int]:
        """Take one step; return the numbers of its groups."""
        groups = self.take()
        if not groups:
            return []
        self.step += 1
        taken = StepGroups(groups=groups, trained=groups)
        self.journal.write_step(self.step, taken, max_staleness=4.0, skipped=False)
        self._unsaved += [group.entry_id for group in groups]
        publish(self.redis, self.step, RUN)
        if self.step % SAVE_STEPS == 0:
            self.save()
        return [group.number for group in groups]

    def save(self) -> None:
        self.journal.sync()
        state = LearnerState(self.step, "now", tuple(self._unsaved))
        self.checkpoints.save(state, lambda folder: (folder / "model").write_bytes(WEIGHTS) and None).result()
        self.buffer.ack(self._unsaved, self.step)
        self._unsaved = []


@asynccontextmanager
async def busy_run(folder: Path) -> AsyncIterator[tuple[EmbeddedRedis, Redis, AsyncRolloutBuffer, str]]:
    """A run that `offbeat backup` finds alive: its server, a client, a worker's buffer, and its uid."""
    config = busy_config(folder)
    make_private(folder)
    write_config(folder, dump_yaml(config))
    mark(folder, RUN)
    with locked(folder), EmbeddedRedis(folder / "redis", RedisConfig()) as server, connect(server.url) as redis:
        async_redis = connect_async(server.url)
        record, _ = await RunStore(async_redis).create(run_spec(config))
        prepare_buffer(redis, config, record.uid)
        publish(redis, 0, RUN)
        write_endpoints(folder, Endpoints(os.getpid(), server.url, ""))
        worker_redis = connect_async(server.url, run_id=RUN)
        with LedgerThread(redis, RUN, folder):
            yield server, redis, AsyncRolloutBuffer(worker_redis, RUN, record.uid), record.uid
        await worker_redis.aclose()
        await async_redis.aclose()
    (folder / "endpoints.json").unlink()


async def play(worker: AsyncRolloutBuffer, num_groups: int) -> None:
    """Play up to so many groups, as many as may be admitted."""
    for task in await worker.claim("w", num_groups * GROUP_SIZE):
        await worker.submit("w", task, trajectory_for(task))


async def keep_busy(worker: AsyncRolloutBuffer, learner: BusyLearner, stop: asyncio.Event) -> int:
    """Play and train until stopped; return the steps."""
    while not stop.is_set():
        await play(worker, 3)
        await asyncio.to_thread(learner.train)
    return learner.step
