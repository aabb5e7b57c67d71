"""The protocol as a state machine on a real Redis: any process may be killed between any two commands.

Checked after each command: the ledger's identity, the admission bound, and that each member of a live group is in exactly
one place. Checked at consumption: the staleness bound. Checked at the end: every group of the surviving lineage was trained
exactly once, nothing is left, and the audit of the ledger that was kept meanwhile proves it.
"""

import asyncio
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from redis import Redis

from deploy.audit import Evidence, audit
from services.buffer.client import SubmitResult
from services.buffer.connection import connect_async
from services.buffer.learner import RedisLearnerBuffer
from services.buffer.ledger import LEDGER_FILE, LedgerFile, events_after, read_ledger
from services.buffer.rollout import AsyncRolloutBuffer
from services.buffer.scripts import BufferKeys
from services.codec import encode_manifest
from services.errors import FencedError
from services.keys import RunKeys
from services.lease import LearnerLease, LeaseHeldError
from services.schema import EpisodeKind, EpisodeTask, Group, Manifest
from services.weights.publisher import PUBLISH
from tests.services.buffer.buffer_play import RUN, Run, limits, trajectory_for
from trainer.intake import Taken
from trainer.journal import StepJournal, read_journal

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
    journal: StepJournal
    now: Checkpoint
    start_up: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    undecided: Group | None = None
    batch: list[Group] = field(default_factory=list[Group])


class Protocol(RuleBasedStateMachine):
    """Workers, learners and weights that take turns in any order."""

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

    # Workers

    @rule(name=st.sampled_from(NAMES), limit=st.integers(1, 7), answer_lost=st.sampled_from([False, False, True]))
    def claim(self, name: str, limit: int, answer_lost: bool) -> None:
        worker = self.workers[name]
        tasks = self.runner.run(worker.buffer.claim(name, limit))
        if answer_lost:
            worker.buffer._claims[name] -= 1
            for task in tasks:
                worker.buffer._forget(name, task)
        else:
            worker.held += tasks
        for task in tasks:
            assert task.kind is EpisodeKind.EVAL or 0 <= task.min_version <= self.published

    @rule(name=st.sampled_from(NAMES), pick=st.integers(0, 99), lag=st.integers(0, 1))
    def submit(self, name: str, pick: int, lag: int) -> None:
        worker = self.workers[name]
        if worker.held:
            task = worker.held.pop(pick % len(worker.held))
            self._hand_in(name, worker.buffer, task, lag)

    @rule(name=st.sampled_from(NAMES), rest=st.integers(0, 3))
    def play_on(self, name: str, rest: int) -> None:
        """Claim all there is and submit all but `rest`."""
        self.claim(name, 50, answer_lost=False)
        while len(self.workers[name].held) > rest:
            self.submit(name, rest, 0)

    @rule(pick=st.integers(0, 99))
    def submit_again(self, pick: int) -> None:
        if self.submitted:
            name, task = self.submitted[pick % len(self.submitted)]
            result = self._hand_in(name, self.workers[name].buffer, task, 0)
            assert result in (SubmitResult.DUPLICATE, SubmitResult.LATE)

    @precondition(lambda self: self.ghosts)
    @rule(pick=st.integers(0, 99), lag=st.integers(0, 1))
    def submit_from_a_worker_thought_dead(self, pick: int, lag: int) -> None:
        name, task, buffer = self.ghosts.pop(pick % len(self.ghosts))
        self._hand_in(name, buffer, task, lag)

    @rule(name=st.sampled_from(NAMES), pick=st.integers(0, 99))
    def fail(self, name: str, pick: int) -> None:
        worker = self.workers[name]
        if worker.held:
            task = worker.held.pop(pick % len(worker.held))
            self.runner.run(worker.buffer.fail(name, task, "boom"))

    @rule(name=st.sampled_from(NAMES))
    def heartbeat(self, name: str) -> None:
        worker = self.workers[name]
        for task in self.runner.run(worker.buffer.heartbeat(name)).cancelled:
            worker.held.remove(task)

    @rule(name=st.sampled_from(NAMES))
    def release(self, name: str) -> None:
        worker = self.workers[name]
        self.runner.run(worker.buffer.release(name))
        worker.held.clear()

    @rule(name=st.sampled_from(NAMES), silently=st.booleans())
    def worker_dies(self, name: str, silently: bool) -> None:
        worker = self.workers[name]
        self.ghosts += [(name, task, worker.buffer) for task in worker.held]
        self.workers[name] = Worker(self.run.other_worker())
        if silently:
            self.run.silence(name)

    # The learner; each rule is at most one command

    @rule(commands=st.integers(1, 12))
    def learner_goes_on(self, commands: int) -> None:
        """The learner's own order of commands, stopped after any of them."""
        for _ in range(commands):
            self._next_command()()

    def _next_command(self) -> Callable[[], None]:
        learner = self.learner
        if learner.start_up:
            return self.start_up
        if learner.now.step > self.published:
            return self.publish
        if learner.undecided is not None:
            return self.keep_or_drop
        if len(learner.batch) == GROUPS_PER_STEP:
            return self.train
        if learner.now.step > self.durable.step + 1:
            return self.checkpoint
        return self.take if learner.now.step < STEPS else self.checkpoint

    @precondition(lambda self: self.learner.start_up)
    @rule()
    def start_up(self) -> None:
        self.learner.start_up.pop(0)()

    @precondition(lambda self: not self.learner.start_up and self.learner.now.step > self.published)
    @rule()
    def publish(self) -> None:
        assert self._publish(self.learner, self.learner.now.step) == b"announced"
        self.published = self.learner.now.step

    def _publish(self, learner: Learner, step: int) -> bytes:
        keys = RunKeys(RUN)
        epoch = learner.buffer.epoch
        manifest = Manifest(RUN, step, step, epoch, "fs", f"/v{step}", "", 0, (), 0.0)
        names = [keys.epoch, keys.manifests, keys.progress, keys.doorbell, keys.versions]
        reply: list[bytes] = self.publisher(keys=names, args=[epoch, step, step, encode_manifest(manifest), 4])  # type: ignore[assignment]
        return reply[0]

    def _may_take(self) -> bool:
        learner = self.learner
        return (
            not learner.start_up
            and learner.now.step <= self.published
            and learner.undecided is None
            and len(learner.batch) < GROUPS_PER_STEP
            and learner.now.step < STEPS
        )

    @precondition(_may_take)
    @rule()
    def take(self) -> None:
        self.learner.undecided = self.learner.buffer.take(0)

    @precondition(lambda self: self.learner.undecided is not None)
    @rule()
    def keep_or_drop(self) -> None:
        group, self.learner.undecided = self.learner.undecided, None
        assert group is not None
        if self.learner.now.step - group.oldest_version > self.max_staleness:
            assert self.max_staleness > 0, "synchronous training meets no stale group"
            self.learner.buffer.drop(group, "stale")
        else:
            self.learner.batch.append(group)

    @precondition(lambda self: len(self.learner.batch) == GROUPS_PER_STEP)
    @rule()
    def train(self) -> None:
        learner, now = self.learner, self.learner.now
        numbers = tuple(group.number for group in learner.batch)
        assert self.history.setdefault(now.step, numbers) == numbers, "a replayed step saw other groups"
        assert all(now.step - group.oldest_version <= self.max_staleness for group in learner.batch)
        assert all(len(group.trajectories) == LIMITS.group_size for group in learner.batch)
        ids = tuple(group.entry_id for group in learner.batch)
        learner.now = Checkpoint(now.step + 1, (*now.lineage, numbers), (*now.consumed, *ids))
        taken = Taken(groups=learner.batch, signal=learner.batch[:1])
        learner.journal.trained(learner.now.step, taken, max_staleness=self.max_staleness, skipped=False)
        learner.batch = []

    @precondition(lambda self: not self.learner.start_up)
    @rule()
    def checkpoint(self) -> None:
        self.durable = self.learner.now

    @precondition(lambda self: not self.learner.start_up)
    @rule()
    def acknowledge(self) -> None:
        acknowledged = self.durable.consumed
        self.learner.buffer.ack(acknowledged, self.durable.step)
        rest = tuple(i for i in self.learner.now.consumed if i not in acknowledged)
        self.learner.now = replace(self.learner.now, consumed=rest)

    @rule()
    def learner_crashes(self) -> None:
        self.zombie, durable = self.learner, self.durable
        self.redis.delete(RunKeys(RUN).lease)  # what its expiry does
        self.learner = self._new_learner()
        buffer = self.learner.buffer
        self.learner.start_up = [
            lambda: buffer.ack(durable.consumed, durable.step),
            lambda: self._restores_nothing(buffer, durable),
        ]

    def _new_learner(self) -> Learner:
        lease = LearnerLease(self.redis, RUN, "learner", 3600.0)
        buffer = self.run.learner = RedisLearnerBuffer(self.redis, RUN, lease.acquire())
        journal = StepJournal(self.folder, buffer.epoch)
        journal.resumed(self.durable.step)
        self.leases.append(lease)
        return Learner(lease, buffer, journal, self.durable)

    @rule()
    def a_second_learner_waits(self) -> None:
        with pytest.raises(LeaseHeldError):
            LearnerLease(self.redis, RUN, "second", 3600.0).acquire()

    # The ledger: whoever copies it dies anywhere too

    @rule(cut=st.integers(0, 40))
    def ledger_is_copied(self, cut: int) -> None:
        """cut: bytes of the last write that a death of the writer leaves out."""
        self.ledger.append(events_after(self.redis, RUN, self.ledger.position))
        if cut:
            self.ledger.close()
            path = self.folder / LEDGER_FILE
            path.write_bytes(path.read_bytes()[:-cut])
            self.ledger = LedgerFile(self.folder)

    @precondition(lambda self: self.zombie is not None)
    @rule(write=st.integers(0, 6))
    def a_replaced_learner_writes(self, write: int) -> None:
        zombie = self.zombie
        assert zombie is not None
        if write > 4:
            assert self._publish(zombie, self.published + write - 4) == b"fenced"
            return
        group = Group("1-1", "run-0", 0, "lake", 0, 0, ())
        writes: list[Callable[[], object]] = [
            lambda: zombie.buffer.take(0),
            lambda: zombie.buffer.drop(zombie.batch[0] if zombie.batch else group, "stale"),
            lambda: zombie.buffer.ack(zombie.now.consumed, zombie.now.step),
            lambda: zombie.buffer.restore(0),
            lambda: zombie.buffer.start_eval("zombie", 1, sampling_name="greedy", min_version=0),
        ]
        with pytest.raises(FencedError):
            writes[write]()

    @precondition(lambda self: not self.learner.start_up)
    @rule()
    def evaluate(self) -> None:
        eval_id = f"step-{self.learner.now.step}"
        self.learner.buffer.start_eval(eval_id, 3, sampling_name="sampled", min_version=self.learner.now.step)
        self.evaluations.add(eval_id)

    # What must hold

    @invariant()
    def the_ledger_adds_up(self) -> None:
        snapshot = self.run.learner.snapshot()
        counters = snapshot.counters
        gone = sum(counters.dropped.values()) + sum(counters.failed.values())
        assert counters.admitted == counters.trained + gone + counters.in_flight
        assert snapshot.playing <= LIMITS.max_groups_in_flight
        bound = math.ceil((self.published + self.max_staleness + 1) * GROUPS_PER_STEP) if self.published >= 0 else 0
        assert counters.admitted - gone <= min(bound, LIMITS.total_groups)

    @invariant()
    def each_member_is_in_one_place(self) -> None:
        root = BufferKeys(RUN).root
        places = [t.decode() for q in ("t", "e") for t in self.redis.lrange(f"{root}:queue:{q}", 0, -1)]  # type: ignore[union-attr]
        for key in self.redis.scan_iter(f"{root}:claims:*"):
            places += [token.decode() for token in self.redis.hkeys(key)]  # type: ignore[union-attr]
        for key in self.redis.scan_iter(f"{root}:unit:*"):
            unit = key.decode().removeprefix(f"{root}:unit:")
            fields = {name.decode() for name in self.redis.hkeys(key)}  # type: ignore[union-attr]
            places += [f"{unit}:{name[1:]}" for name in fields if name[0] in "sd" and name[1:].isdigit()]
            members = int(self.redis.hget(key, "members"))  # type: ignore[arg-type]
            assert {f"{unit}:{i}" for i in range(members)} <= set(places)
        assert len(places) == len(set(places))
        live = {key.decode() for key in self.redis.scan_iter(f"{root}:unit:*")}
        assert {f"{root}:unit:{place.rpartition(':')[0]}" for place in places} <= live

    @invariant()
    def versions_only_grow(self) -> None:
        raw: bytes | None = self.redis.hget(RunKeys(RUN).progress, "version")  # type: ignore[assignment]
        assert (-1 if raw is None else int(raw)) == self.published

    @invariant()
    def no_group_is_trained_twice(self) -> None:
        for state in (self.learner.now, self.durable):
            numbers = [number for batch in state.lineage for number in batch]
            assert len(numbers) == len(set(numbers))

    def teardown(self) -> None:
        try:
            for _ in range(200):
                results = [self.run.learner.eval_result(eval_id) for eval_id in self.evaluations]
                if None not in results and self.run.learner.counters().trained == LIMITS.total_groups:
                    break
                self._everyone_acts_once()
            self._ends_complete()
            self._audit_proves_it()
        finally:
            for lease in self.leases:
                lease.release()
            self.runner.run(self.async_redis.aclose())
            self.runner.close()
            shutil.rmtree(self.folder)

    def _everyone_acts_once(self) -> None:
        for name, worker in self.workers.items():
            self.heartbeat(name)
            self.claim(name, 50, answer_lost=False)
            while worker.held:
                self.submit(name, 0, 0)
        for _ in range(8):
            self._next_command()()
        if not self.learner.start_up:
            self.checkpoint()
            self.acknowledge()

    def _ends_complete(self) -> None:
        counters = self.run.learner.counters()
        assert counters.trained == LIMITS.total_groups
        assert counters.in_flight == 0
        numbers = [number for batch in self.durable.lineage for number in batch]
        assert len(numbers) == len(set(numbers)) == LIMITS.total_groups
        for eval_id in self.evaluations:
            assert self.run.learner.eval_result(eval_id) is not None
            self.run.learner.forget_eval(eval_id)
        assert [self.run.keys_left(part) for part in ("unit", "blobs", "claims", "queue")] == [[]] * 4

    def _audit_proves_it(self) -> None:
        self.ledger_is_copied(cut=17)
        self.ledger_is_copied(cut=0)
        journal, broken = read_journal(self.folder)
        evidence = Evidence(
            events=read_ledger(self.folder),
            journal=journal,
            checkpoints={self.durable.step: ""},
            counters=self.run.learner.counters(),
            groups_per_step=GROUPS_PER_STEP,
            max_steps=STEPS,
            broken_lines=broken,
        )
        found = audit(evidence)
        assert found.proven, found.findings
        assert found.lineage.last == STEPS
        assert [sorted(g.number for g in line.groups) for line in found.lineage.steps] == [
            sorted(batch) for batch in self.durable.lineage
        ]
        assert max(found.staleness) <= self.max_staleness

    def _hand_in(self, name: str, buffer: AsyncRolloutBuffer, task: EpisodeTask, lag: int) -> SubmitResult:
        version = max(task.min_version, self.published - lag)
        result = self.runner.run(buffer.submit(name, task, trajectory_for(task, version=version)))
        self.submitted.append((name, task))
        return result

    def _restores_nothing(self, buffer: RedisLearnerBuffer, durable: Checkpoint) -> None:
        assert buffer.restore(durable.step * GROUPS_PER_STEP) == 0
