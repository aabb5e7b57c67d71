"""Rules of learners: each is at most one command, so that one may die between any two."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from offbeat.services.errors import FencedError, ReconcileError
from offbeat.services.keys import RunKeys
from offbeat.services.messages.types import Group
from offbeat.services.redis.lease import LearnerLease, LeaseHeldError, free_lease_of
from offbeat.trainer.learner.step_groups import StepGroups
from tests.copying import replace
from tests.services.buffer.buffer_play import RUN
from tests.simulation.actors import (
    GROUPS_PER_STEP,
    LIMITS,
    NAMES,
    STEPS,
    Checkpoint,
    Played,
    check_rewards,
)
from tests.simulation.stopped_files import Paused, kill_at


class LearnerRules(Played):
    """A learner in its own order of commands or out of it, one that waits, and one that was replaced and still writes."""

    @rule(commands=st.integers(1, 12))
    def learner_continues(self, commands: int) -> None:
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
        reply = self._publish(self.learner, self.learner.now.step)
        if reply == b"reconcile":  # given up; the next command reconciles
            assert self.has_lost
            self.learner.buffer.adopt(self.learner.now.step)
        else:
            assert reply == b"announced"

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
        check_rewards(group)
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
        taken = StepGroups(groups=learner.batch, trained=learner.batch[:1])
        learner.journal.write_step(learner.now.step, taken, max_staleness=self.max_staleness, skipped=False)
        learner.batch = []

    @precondition(lambda self: not self.learner.start_up)
    @rule()
    def checkpoint(self) -> None:
        now = self.learner.now
        self._save(self.learner, now)
        self.durable = now
        self.may_be_durable = {now}
        assert self.newest_checkpoint() == now

    @precondition(lambda self: not self.learner.start_up)
    @rule(operations=st.integers(0, 90))
    def learner_is_killed_in_its_checkpoint(self, operations: int) -> None:
        learner, now = self.learner, self.learner.now
        self.may_be_durable = {self.durable, now}
        kill_at(lambda: self._save(learner, now), self.checkpoints, operations)
        self.learner_crashes()

    @precondition(lambda self: not self.learner.start_up)
    @rule(operations=st.integers(0, 90))
    def learner_is_paused_in_its_checkpoint(self, operations: int) -> None:
        """A successor takes the run over meanwhile."""
        learner, now = self.learner, self.learner.now
        self.may_be_durable = {self.durable, now}
        self.paused.append(Paused(lambda: self._save(learner, now), self.checkpoints, operations))
        self.learner_crashes()

    @precondition(lambda self: self.paused)
    @rule()
    def a_paused_learner_wakes(self) -> None:
        before = self._checkpoint_files()
        error = self.paused.pop(0).wake()
        assert error is None or isinstance(error, FencedError)
        assert self._checkpoint_files() == before, "a paused learner changed its successor's checkpoints"

    def _checkpoint_files(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in sorted(self.checkpoints.glob("step-*/**/*")) if path.is_file()}

    @precondition(lambda self: self.zombie is not None)
    @rule()
    def a_replaced_learner_saves(self) -> None:
        assert self.zombie is not None
        zombie, before = self.zombie, self._checkpoint_files()
        with pytest.raises(FencedError):
            self._save(zombie, zombie.now)
        assert self._checkpoint_files() == before

    @rule()
    def time_jumps(self) -> None:
        """All workers are thought dead, and the lease expires."""
        for name in NAMES:
            self.run.silence(name)
        self.redis.delete(RunKeys(RUN).lease)

    @precondition(lambda self: not self.learner.start_up)
    @rule()
    def acknowledge(self) -> None:
        acknowledged = self.durable.consumed
        self.learner.buffer.ack(acknowledged, self.durable.step)
        rest = tuple(i for i in self.learner.now.consumed if i not in acknowledged)
        self.learner.now = replace(self.learner.now, consumed=rest)

    @rule()
    def learner_crashes(self) -> None:
        self.zombie = self.learner
        free_lease_of(self.redis, RUN, "learner")
        self.learner = self._new_learner()

    def is_leased(self) -> bool:
        """Return whether Redis has not lost the lease."""
        return bool(self.redis.exists(RunKeys(RUN).lease))

    @precondition(is_leased)
    @rule()
    def a_second_learner_waits(self) -> None:
        with pytest.raises(LeaseHeldError):
            LearnerLease(self.redis, RUN, "second", 3600.0).acquire()

    @precondition(lambda self: self.zombie is not None)
    @rule(write=st.integers(0, 6))
    def a_replaced_learner_writes(self, write: int) -> None:
        zombie = self.zombie
        assert zombie is not None
        if write > 4:
            refused = self._publish(zombie, self.published + write - 4)
            assert refused == b"fenced" or (self.has_lost and refused == b"reconcile")
            return
        group = Group("1-1", "run-0", 0, "lake", 0, 0, ())
        writes: list[Callable[[], object]] = [
            lambda: zombie.buffer.take(0),
            lambda: zombie.buffer.drop(zombie.batch[0] if zombie.batch else group, "stale"),
            lambda: zombie.buffer.ack(zombie.now.consumed, zombie.now.step),
            lambda: zombie.buffer.reconcile(self._prove(zombie)),
            lambda: zombie.buffer.start_eval("zombie", 1, sampling_name="greedy", min_version=0),
        ]
        with pytest.raises((FencedError, ReconcileError) if self.has_lost else FencedError):
            writes[write]()

    # Redis comes back

    @rule()
    def redis_is_copied(self) -> None:
        """A state that Redis may come back at."""
        dumps: dict[bytes, tuple[int, bytes]] = {}
        for key in self.redis.scan_iter():
            dumps[key] = (max(0, self.redis.pttl(key)), self.redis.dump(key))  # type: ignore[arg-type,assignment]
        self.snapshots.append(dumps)

    @rule(pick=st.integers(0, 99))
    def redis_comes_back_at_an_earlier_state(self, pick: int) -> None:
        """Whatever it acknowledged since is lost; the first connection to the new process says so (verify.lua)."""
        self.has_lost = True
        self.redis.flushall()
        self.snapshots = self.snapshots[: 1 + pick % len(self.snapshots)]  # later ones are of a past that is gone
        for key, (time_to_live_ms, dump) in self.snapshots[-1].items():
            self.redis.restore(key, time_to_live_ms, dump)
        keys = RunKeys(RUN)
        incarnation: bytes | None = self.redis.get(keys.incarnation)  # type: ignore[assignment]
        if incarnation is not None and not incarnation.endswith(b"?"):
            self.redis.set(keys.incarnation, incarnation + b"?")
        version: bytes | None = self.redis.hget(keys.progress, "version")  # type: ignore[assignment]
        self.published = -1 if version is None else int(version)

    @precondition(lambda self: not self.learner.start_up)
    @rule()
    def evaluate(self) -> None:
        eval_id = f"step-{self.learner.now.step}"
        self.learner.buffer.start_eval(eval_id, 3, sampling_name="sampled", min_version=self.learner.now.step)
        self.evaluations[eval_id] = None
