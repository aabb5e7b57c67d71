"""What the protocol's state machine plays with: workers, learners and what is durable of them, on a real Redis."""

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis.stateful import RuleBasedStateMachine
from redis import Redis

from offbeat.services.buffer.api import SubmitResult
from offbeat.services.buffer.group_ledger import LedgerFile
from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.buffer.worker_client import AsyncRolloutBuffer
from offbeat.services.keys import RunKeys
from offbeat.services.messages.codec import encode_manifest
from offbeat.services.messages.types import EpisodeTask, Group, Manifest
from offbeat.services.redis.connection import connect_async
from offbeat.services.redis.lease import LearnerLease
from offbeat.services.weights.publisher import PUBLISH
from offbeat.trainer.learner.step_ledger import StepLedger
from tests.copying import replace
from tests.services.buffer.buffer_play import (
    RUN,
    Run,
    limits,
    trajectory_for,
)

GROUPS_PER_STEP = 2
STEPS = 5
LIMITS = limits(
    groups_per_step=GROUPS_PER_STEP,
    redundancy=1,
    max_groups_in_flight=3,
    total_groups=STEPS * GROUPS_PER_STEP,
    max_attempts=3,
)
NAMES = ("a", "b", "c")


@dataclass
class Worker:
    """An env worker's process and the episodes that it believes to play."""

    buffer: AsyncRolloutBuffer
    held: list[EpisodeTask] = field(default_factory=list[EpisodeTask])


@dataclass(frozen=True)
class Checkpoint:
    """What is durable of a learner."""

    step: int = 0
    lineage: tuple[tuple[int, ...], ...] = ()
    """Group numbers of each batch that the weights have seen."""
    consumed: tuple[str, ...] = ()
    """Entry ids of those that may not be acknowledged yet."""


@dataclass
class Learner:
    """A learner's process."""

    lease: LearnerLease
    buffer: RedisLearnerBuffer
    journal: StepLedger
    now: Checkpoint
    start_up: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    undecided: Group | None = None
    batch: list[Group] = field(default_factory=list[Group])


class Played(RuleBasedStateMachine):
    """Where workers, learners and weights stand, and how each of them writes to Redis."""

    redis: Redis
    url: str
    max_staleness = 1

    def __init__(self) -> None:
        super().__init__()
        self.redis.flushall()
        self.leases: list[LearnerLease] = []
        self.runner = asyncio.Runner()
        self.runner.get_loop()
        self.async_redis = connect_async(self.url)
        self.run = Run.begin(
            self.redis, self.async_redis, replace(LIMITS, max_staleness=float(self.max_staleness)), step=-1
        )
        self.workers = {name: Worker(self.run.other_worker()) for name in NAMES}
        self.ghosts: list[tuple[str, EpisodeTask, AsyncRolloutBuffer]] = []
        self.submitted: list[tuple[str, EpisodeTask]] = []
        self.folder = Path(tempfile.mkdtemp())
        self.ledger = LedgerFile(self.folder)
        self.publisher = self.redis.register_script(PUBLISH)
        self.durable = Checkpoint()
        self.learner = self._new_learner()
        self.zombie: Learner | None = None
        self.published = -1
        self.history: dict[int, tuple[int, ...]] = {}
        self.evaluations: set[str] = set()

    def _new_learner(self) -> Learner:
        lease = LearnerLease(self.redis, RUN, "learner", 3600.0)
        buffer = self.run.learner = RedisLearnerBuffer(self.redis, RUN, lease.acquire())
        journal = StepLedger(self.folder, buffer.epoch)
        journal.write_resumed(self.durable.step)
        self.leases.append(lease)
        return Learner(lease, buffer, journal, self.durable)

    def _publish(self, learner: Learner, step: int) -> bytes:
        keys = RunKeys(RUN)
        epoch = learner.buffer.epoch
        manifest = Manifest(RUN, step, step, epoch, "fs", f"/v{step}", "", 0, (), 0.0)
        names = [keys.epoch, keys.manifests, keys.progress, keys.doorbell, keys.versions]
        reply: list[bytes] = self.publisher(keys=names, args=[epoch, step, step, encode_manifest(manifest), 4])  # type: ignore[assignment]
        return reply[0]

    def _hand_in(self, name: str, buffer: AsyncRolloutBuffer, task: EpisodeTask, lag: int) -> SubmitResult:
        version = max(task.min_version, self.published - lag)
        result = self.runner.run(buffer.submit(name, task, trajectory_for(task, version=version)))
        self.submitted.append((name, task))
        return result
