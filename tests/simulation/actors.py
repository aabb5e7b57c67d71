"""Workers, learners and their durable state, on a real Redis."""

import asyncio
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis.stateful import RuleBasedStateMachine
from msgspec import structs
from redis import Redis

from offbeat.services.buffer.api import GroupSamples, Proof, Reconciled, SubmitResult
from offbeat.services.buffer.config import Order
from offbeat.services.buffer.group_ledger import LedgerFile
from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.buffer.members import Addition
from offbeat.services.buffer.worker_client import AsyncRolloutBuffer
from offbeat.services.keys import RunKeys
from offbeat.services.messages.codec import encode_manifest
from offbeat.services.messages.types import EpisodeKind, EpisodeTask, Group, Manifest
from offbeat.services.redis.connection import connect_async
from offbeat.services.redis.incarnation import KnownIncarnation
from offbeat.services.redis.lease import LearnerLease
from offbeat.services.weights.publisher import PUBLISH
from offbeat.trainer.learner.step_ledger import StepLedger, newest_epoch
from offbeat.trainer.training.checkpoint import LearnerState, newest_complete
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from tests.copying import replace
from tests.services.buffer.buffer_play import (
    RUN,
    Run,
    limits,
    trajectory_for,
)
from tests.simulation.stopped_files import InlineExecutor, Paused

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
KEEP = 2
"""Checkpoints."""
LINEAGE = "lineage.json"
NONCE, COMPARED = "nonce", "reward/compared"
"""Metrics of an answer: a number that no other has, and the same as rewards of its group read it in its sample."""


def is_compared(number: int, index: int) -> bool:
    """Return whether rewards compare a member with its group: two of three, and in every fourth group none."""
    return index != 2 and number % 4 != 3


def check_rewards(group: Group) -> None:
    """Check that each compared member has the rewards of its own answer, once, and that no other has some."""
    for member in group.trajectories:
        own = member.metrics[NONCE] if is_compared(group.number, member.index) else None
        assert member.metrics.get(COMPARED) == own, "an answer has the rewards of another"
        assert member.reward == (1.0 if own is None else 2.0)


@dataclass
class Worker:
    """An env worker's process and the episodes that it believes to play."""

    buffer: AsyncRolloutBuffer
    held: list[EpisodeTask] = field(default_factory=list[EpisodeTask])


@dataclass(frozen=True)
class Checkpoint:
    """Durable state of a learner."""

    step: int = 0
    lineage: tuple[tuple[int, ...], ...] = ()
    """Group numbers of each batch that the weights have seen."""
    consumed: tuple[str, ...] = ()
    """Entry ids of those that may not be acknowledged yet."""


@dataclass
class Learner:
    """A learner's process."""

    lease: LearnerLease
    store: CheckpointStore
    buffer: RedisLearnerBuffer
    journal: StepLedger
    now: Checkpoint
    start_up: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    undecided: Group | None = None
    batch: list[Group] = field(default_factory=list[Group])
    published: int = -1
    """Version that it published last."""


class Played(RuleBasedStateMachine):
    """Where workers, learners and weights stand, and how each of them writes to Redis."""

    redis: Redis
    url: str
    max_staleness = 1
    order: Order = "completion"

    def __init__(self) -> None:
        super().__init__()
        self.redis.flushall()
        self.leases: list[LearnerLease] = []
        self.journals: list[StepLedger] = []
        self.runner = asyncio.Runner()
        self.runner.get_loop()
        self.async_redis = connect_async(self.url)
        self.run = Run.begin(
            self.redis, self.async_redis, replace(LIMITS, max_staleness=float(self.max_staleness)), step=-1
        )
        self.workers = {name: Worker(self.run.other_worker()) for name in NAMES}
        self.ghosts: list[tuple[str, EpisodeTask, AsyncRolloutBuffer]] = []
        self.submitted: list[tuple[str, EpisodeTask, GroupSamples | None]] = []
        self.samples: dict[tuple[AsyncRolloutBuffer, EpisodeTask], GroupSamples] = {}
        """What each process has read of the groups that it scores."""
        self.num_answers = 0
        self.folder = Path(tempfile.mkdtemp())
        self.ledger = LedgerFile(self.folder)
        self.publisher = self.redis.register_script(PUBLISH)
        self.known: dict[int, KnownIncarnation] = {}
        self.durable = Checkpoint()
        self.may_be_durable = {self.durable}
        """Possible contents of the newest checkpoint once a learner has taken the folder over."""
        self.paused: list[Paused] = []
        self.evaluations: dict[str, None] = {}
        self.history: dict[int, tuple[int, ...]] = {}
        """Groups of each step, which a successor repeats."""
        self.lost_to = -1
        """Step of the last reconciliation by a learner that continued."""
        self.newest = -1
        """Newest version that any learner has published."""
        self.limits = replace(LIMITS, max_staleness=float(self.max_staleness))
        self.learner = self._new_learner()
        self.zombie: Learner | None = None
        self.published = -1
        """Newest version in Redis."""
        self.snapshots: list[dict[bytes, tuple[int, bytes]]] = [{}]
        """Earlier states of Redis: key -> time to live (ms; 0: none) and dump; at first that of an emptied one."""
        self.has_lost = False
        self.learner.start_up.pop()()

    def _new_learner(self) -> Learner:
        lease = LearnerLease(self.redis, RUN, "learner", 3600.0, newest_epoch=lambda: newest_epoch(self.folder))
        known = KnownIncarnation(self.redis, RUN)
        buffer = self.run.learner = RedisLearnerBuffer(
            self.redis, RUN, lease.acquire(), known=known, limits=self.limits, reclaim=lease.reclaim, order=self.order
        )
        self.known[buffer.epoch] = known
        journal = StepLedger(self.folder, buffer.epoch)
        self.journals.append(journal)
        journal.write_lease()
        self.leases.append(lease)
        store = CheckpointStore(self.checkpoints, KEEP, buffer.epoch)
        store._thread = InlineExecutor()  # pyright: ignore[reportAttributeAccessIssue]
        self.durable = self.newest_checkpoint()
        assert self.durable in self.may_be_durable, "a durable checkpoint is lost, or an unfinished one is loaded"
        self.may_be_durable = {self.durable}
        learner = Learner(lease, store, buffer, journal, self.durable, start_up=[])
        learner.start_up = [lambda: self._starts(learner)]
        return learner

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def newest_checkpoint(self) -> Checkpoint:
        """Return what the disk holds."""
        newest = newest_complete(self.checkpoints)
        if newest is None:
            return Checkpoint()
        lineage = json.loads((newest.path / LINEAGE).read_text())
        return Checkpoint(newest.state.step, tuple(tuple(numbers) for numbers in lineage), newest.state.entry_ids)

    def _save(self, learner: Learner, now: Checkpoint) -> None:
        def write(folder: Path) -> None:
            (folder / LINEAGE).write_text(json.dumps(now.lineage))

        learner.store.save(LearnerState(now.step, "run", entry_ids=now.consumed), write).result()

    def _prove(self, learner: Learner) -> Proof:
        step = self.durable.step
        return learner.journal.prove(step, step * GROUPS_PER_STEP, 0)

    def _starts(self, learner: Learner) -> None:
        """Start as `trainer.learner.loop` does."""
        learner.buffer.prove_with(lambda: self._prove(learner), lambda result: self._reconciled(learner, result))
        result = learner.buffer.reconcile(self._prove(learner))
        learner.journal.write_resumed(learner.now.step, result.num_added, result.incarnation)
        if result.is_new or self.durable.step <= self.lost_to:
            self._forget_steps(self.durable.step)
        self.newest = max(self.newest, learner.buffer.newest_version())
        self._queue_evaluations_again(learner)

    def _reconciled(self, learner: Learner, result: Reconciled) -> None:
        assert self.has_lost
        learner.journal.write_reconciled(learner.now.step, result)
        self.lost_to = learner.now.step
        self._forget_steps(learner.now.step)
        self._queue_evaluations_again(learner)
        if learner.published == learner.now.step:
            self._publish(learner, learner.published)

    def _forget_steps(self, first: int) -> None:
        """Groups of steps from `first` on may be lost: they are repeated on others."""
        self.history = {step: numbers for step, numbers in self.history.items() if step < first}

    def _queue_evaluations_again(self, learner: Learner) -> None:
        for eval_id in self.evaluations:
            learner.buffer.start_eval(eval_id, 3, sampling_name="sampled", min_version=int(eval_id.partition("-")[2]))

    def _publish(self, learner: Learner, step: int) -> bytes:
        keys = RunKeys(RUN)
        epoch = learner.buffer.epoch
        manifest = Manifest(RUN, step, step, epoch, "fs", f"/v{step}", "", 0, (), 0.0)
        names = [keys.epoch, keys.manifests, keys.progress, keys.doorbell, keys.versions, keys.incarnation]
        known = self.known[epoch]._value or "none"
        args = [epoch, step, step, encode_manifest(manifest), 4, known]
        reply: list[bytes] = self.publisher(keys=names, args=args)  # type: ignore[assignment]
        if reply[0] in (b"announced", b"exists"):
            learner.published = step
            self.published = max(self.published, step)
            self.newest = max(self.newest, step)
        return reply[0]

    def _is_pending(self) -> bool:
        """Return whether a learner has to reconcile the data first."""
        incarnation: bytes | None = self.redis.get(RunKeys(RUN).incarnation)  # type: ignore[assignment]
        return incarnation is None or incarnation.endswith(b"?")

    def _read_samples(self, name: str, buffer: AsyncRolloutBuffer, task: EpisodeTask) -> None:
        if task.is_scoring:
            self.samples[buffer, task] = self.runner.run(buffer.samples(name, task))

    def _hand_in(
        self,
        name: str,
        buffer: AsyncRolloutBuffer,
        task: EpisodeTask,
        lag: int,
        samples: GroupSamples | None = None,
    ) -> SubmitResult:
        """samples: None: what the process has read."""
        if task.is_scoring:
            samples = samples or self.samples[buffer, task]
            additions = {i: Addition(1.0, {COMPARED: float(each)}) for i, each in samples.by_member.items()}
            result = self.runner.run(buffer.score_group(name, task, additions, samples.mark))
        else:
            result = self._submit(name, buffer, task, lag)
        self.submitted.append((name, task, samples))
        return result

    def _submit(self, name: str, buffer: AsyncRolloutBuffer, task: EpisodeTask, lag: int) -> SubmitResult:
        version = max(task.min_version, self.published - lag)
        self.num_answers += 1
        answer = trajectory_for(task, version=version)
        answer = structs.replace(answer, metrics={NONCE: float(self.num_answers)})
        has_sample = task.kind is EpisodeKind.TRAIN and is_compared(task.number, task.index)
        return self.runner.run(buffer.submit(name, task, answer, str(self.num_answers).encode() if has_sample else b""))
