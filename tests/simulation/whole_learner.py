"""Seeded lives of whole learners: the real loop, publisher, checkpoints, journal and lease, on a real Redis and folder.

Between any two commands, file operations and syncs of a learner, the seed lets workers act, background work be done, and the
learner, the power or Redis' memory fail. A learner has a thread of its own, but only one thread runs at a time.
"""

import asyncio
import json
import os
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from offbeat.deploy.audit.audit import Evidence, audit
from offbeat.services.buffer.group_ledger import LedgerFile, read_events_after, read_ledger
from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.errors import FencedError, ReconcileError
from offbeat.services.keys import RunKeys
from offbeat.services.messages.types import EpisodeTask
from offbeat.services.redis.connection import connect, connect_async
from offbeat.services.redis.incarnation import KnownIncarnation
from offbeat.services.redis.lease import LearnerLease, LeaseHeldError, free_lease_of
from offbeat.services.rollout.tasks import make_sampler
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.publisher import RedisWeightPublisher
from offbeat.trainer.data.replay_buffer import ReplayBuffer
from offbeat.trainer.learner.evaluations import Evaluations
from offbeat.trainer.learner.group_intake import GroupIntake
from offbeat.trainer.learner.loop import Learner, LearnerComponents
from offbeat.trainer.learner.reporter import LearnerReporter
from offbeat.trainer.learner.staleness_controller import StalenessController
from offbeat.trainer.learner.step_ledger import StepLedger, newest_epoch, read_step_ledger
from offbeat.trainer.learner.task_sampler import Curriculum
from offbeat.trainer.learner.trajectory_samples import TrajectorySampler
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.trackers.base import LoggedSteps
from offbeat.trainer.training.batch_log import BatchLog
from offbeat.trainer.training.checkpoint import newest_complete, read_epoch
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from tests.fakes import DictBoard, DictLog, FakeTrainer, ListSink
from tests.services.buffer.buffer_play import RUN, Run, limits, trajectory_for
from tests.simulation.disk import Disk
from tests.simulation.learner_life import DeferredExecutor, Life
from tests.trainer.learner.harness import GROUPS_PER_STEP, NumberTokenizer, learner_config

STEPS = 6
NAMES = ("a", "b")
KEYS = RunKeys(RUN)
VOCABULARY = 64
MAX_MOMENTS = 6_000
"""More than six times those of the longest of 60 seeds: lives without progress are endless."""
MOMENT_S = 0.001
FAULTS = ("killed", "paused", "power", "forgets")
MONOTONIC, SLEEP = time.monotonic, time.sleep


class World:
    """What outlives a learner: Redis, the disk, workers, and a ledger that is copied."""

    def __init__(self, redis: Redis, url: str, seed: int) -> None:
        self._walk = walk = random.Random(seed)
        self._thread = threading.current_thread()
        self._redis, self._url = redis, url
        redis.flushall()
        redis.script_flush()  # a script that is there takes a command less
        self.folder = Path(tempfile.mkdtemp(prefix="offbeat-lives-")) / "run"
        self.folder.mkdir()
        self._bound = walk.choice((0, 1, 1, 8))
        self._order = walk.choice(("completion", "admission"))
        self._config = learner_config(
            max_steps=STEPS,
            save_steps=walk.choice((1, 2, 3)),
            model_update_frequency=walk.choice((1, 1, 2)),
            max_staleness=float(self._bound),
            **walk.choice(({}, {"zero_variance": "refill", "max_refill_ratio": 0.5})),
        )
        if self._config.model_update_frequency > self._bound + 1:
            self._config = self._config.model_copy(update={"model_update_frequency": 1})
        self._limits = limits(
            max_staleness=float(self._bound), total_groups=STEPS * GROUPS_PER_STEP, max_groups_in_flight=4
        )
        self._runner = asyncio.Runner()
        self._runner.get_loop()
        self._async_redis = connect_async(url)
        self._run = Run.begin(redis, self._async_redis, self._limits, step=-1)
        self._workers = {name: self._run.other_worker() for name in NAMES}
        self._held: dict[str, list[EpisodeTask]] = {name: [] for name in NAMES}
        self._ledger = LedgerFile(self.folder)
        self._snapshots: list[dict[bytes, tuple[int, bytes]]] = [{}]
        self._faults_left = walk.randint(0, 6)
        self._fault_rate = walk.choice((0.003, 0.01, 0.03))
        self._num_moments = 0
        self._has_finished = False
        """Whether a learner has given Redis all that is owed to it: what is lost later, no learner can notice."""
        self.now = 0.0
        """Monotonic time of the learners, s."""
        self._lives: list[Life] = []
        self._paused: list[Life] = []
        self.disk = Disk(self.folder)
        self.happened = Counter[str]()

    def play(self) -> None:
        """Let learners live until one finishes, then see that all is complete and proven."""
        life = self._begin_life()
        while True:
            life.go()
            is_replaced = (
                isinstance(life.error, FencedError) and self._paused
            )  # by one that was paused before its lease
            if life.error is not None and not is_replaced:
                raise life.error
            if life.outcome == "finished":
                break
            if not life.has_ended:
                self._paused.append(life)
            life = self._begin_life()
        for paused in self._paused:
            self._wake(paused, until_its_end=True)
        self._is_complete()

    def clean_up(self) -> None:
        for life in self._lives:
            life.kill()
            while not life.has_ended:
                life.go()
            if life.lease is not None:
                life.lease._stop.set()
        self._ledger.close()
        self._runner.run(self._async_redis.aclose())
        self._runner.close()
        self.disk.close()
        shutil.rmtree(self.folder.parent)

    def _begin_life(self) -> Life:
        self.happened["lives"] += 1
        self._has_finished = False
        self._lives.append(life := Life(self))
        return life

    def lead(self, life: Life) -> None:
        """Be a learner, as `trainer.process.learner_process` composes one."""
        redis = connect(self._url)
        execute = redis.execute_command

        def command(*arguments: Any, **options: Any) -> Any:
            life.moment()
            if arguments[0] != "XREAD" or b"BLOCK" not in arguments:
                return execute(*arguments, **options)
            self._play_on()
            place = arguments.index(b"BLOCK") + 1
            self.now += int(arguments[place]) / 1000
            return execute(*arguments[: place - 1], *arguments[place + 1 :], **options)  # does not block

        redis.execute_command = command
        lease = LearnerLease(
            redis, RUN, f"learner-{self._lives.index(life)}", 3600.0,
            newest_epoch=lambda: max(read_epoch(self.checkpoints), newest_epoch(self.folder)),
        )  # fmt: skip
        life.lease = lease
        known, epoch = KnownIncarnation(redis, RUN), self._acquire(lease)
        journal = StepLedger(self.folder, epoch)
        journal.write_lease()
        weights = WeightsConfig(transport="fs", url=str(self.folder / "weights"))
        publisher = RedisWeightPublisher(redis, RUN, weights, epoch, self.folder, known=known)
        publisher._thread = DeferredExecutor(life)  # pyright: ignore[reportAttributeAccessIssue]
        buffer = RedisLearnerBuffer(
            redis, RUN, epoch, order=self._order, known=known, limits=self._limits, reclaim=lease.reclaim
        )
        store = CheckpointStore(self.checkpoints, 2, epoch)
        store._thread = DeferredExecutor(life)  # pyright: ignore[reportAttributeAccessIssue]
        learner = Learner(
            LearnerRun("run", "now", self.folder, self._config), self._components(buffer, publisher, store, journal)
        )
        if (newest := store.newest_complete("now")) is not None:
            learner.resume(newest)
        assert learner.run()
        self._has_finished = True
        lease.check()
        publisher.close()
        journal.close()

    def _acquire(self, lease: LearnerLease) -> int:
        while True:
            try:
                return lease.acquire()
            except LeaseHeldError as error:  # of one that is paused or dead: it expires
                free_lease_of(self._redis, RUN, error.owner)

    def _components(
        self, buffer: RedisLearnerBuffer, publisher: RedisWeightPublisher, store: CheckpointStore, journal: StepLedger
    ) -> LearnerComponents:
        config, sink = self._config, ListSink()
        manager = config.train_env_manager
        return LearnerComponents(
            buffer=buffer,
            publisher=publisher,
            trainer=FakeTrainer(),
            checkpoints=store,
            uploads=None,
            batch_log=BatchLog(self.folder),
            evaluations=Evaluations(buffer, sink, DictLog(), self.folder / "evaluations", epoch=buffer.epoch),
            intake=GroupIntake(buffer, config, GROUPS_PER_STEP, False, VOCABULARY),
            reporter=LearnerReporter(sink, DictBoard()),
            ledger=journal,
            replay=ReplayBuffer(config.replay, GROUPS_PER_STEP, config.seed),
            staleness=StalenessController(
                config.staleness_controller,
                buffer,
                groups_per_step=GROUPS_PER_STEP,
                num_env_groups=manager.num_env_groups,
            ),
            curriculum=Curriculum(make_sampler(config.custom_envs, manager), buffer),
            sampler=TrajectorySampler(
                NumberTokenizer, config.custom_envs, config.logging_samples, LoggedSteps(config.logging_steps, STEPS)
            ),
            should_stop=lambda: False,
        )

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def monotonic(self) -> float:
        """Return the learners' time, and other threads their own: asyncio has timed out where those advanced it."""
        return self.now if self._is_here() else MONOTONIC()

    def sleep(self, seconds: float) -> None:
        if self._is_here():
            self.now += seconds
        else:
            SLEEP(seconds)

    def _is_here(self) -> bool:
        thread = threading.current_thread()
        return thread is self._thread or any(life.thread is thread for life in self._lives)

    # What the seed does between two operations of a learner

    def act(self, life: Life) -> None:
        self._num_moments += 1
        self.now += MOMENT_S
        assert self._num_moments < MAX_MOMENTS, f"no end after {self.happened}"
        if life in self._paused:
            if self._walk.random() < 0.1:
                life.pause()
            return
        chance = self._walk.random()
        if chance < 0.15:
            self._worker_acts(self._walk.choice(NAMES))
        elif chance < 0.2:
            self._copy_ledger()
        elif chance < 0.23:
            self._snapshots.append(self._dump())
        elif chance < 0.26 and self._paused:
            self._wake(self._walk.choice(self._paused))
        elif chance < 0.4:
            life.do_background_work()
        if self._faults_left and self._walk.random() < self._fault_rate:
            self._faults_left -= 1
            self._fail(life, self._walk.choice(FAULTS))

    def _fail(self, life: Life, fault: str) -> None:
        self.happened[fault] += 1
        match fault:
            case "killed":
                life.kill()
            case "paused":
                life.pause()
            case "power":
                self._cut_power()
            case _ if not self._has_finished:
                self._redis_forgets()

    def _cut_power(self) -> None:
        """Every process on the host dies; Redis, with its own disk, may lose writes, too."""
        for life in self._lives:
            life.kill()
        self._ledger.close()
        self.disk.cut(self._walk)
        self._ledger = LedgerFile(self.folder)
        newest = newest_complete(self.checkpoints, "now")
        saved = GROUPS_PER_STEP * (newest.state.step if newest is not None else 0)
        assert self._run.learner.counters().trained <= saved, "acknowledged groups are in no checkpoint"
        if self._walk.random() < 0.5:
            self._redis_forgets()

    def _redis_forgets(self) -> None:
        """Redis comes back at an earlier state; the first connection to the new process says so (verify.lua)."""
        self._redis.flushall()
        self._snapshots = self._snapshots[: 1 + self._walk.randrange(len(self._snapshots))]
        for key, (time_to_live_ms, dump) in self._snapshots[-1].items():
            self._redis.restore(key, time_to_live_ms, dump)
        incarnation: bytes | None = self._redis.get(KEYS.incarnation)  # type: ignore[assignment]
        if incarnation is not None and not incarnation.endswith(b"?"):
            self._redis.set(KEYS.incarnation, incarnation + b"?")

    def _dump(self) -> dict[bytes, tuple[int, bytes]]:
        keys: list[bytes] = list(self._redis.scan_iter())
        return {key: (max(0, self._redis.pttl(key)), self._redis.dump(key)) for key in keys}  # type: ignore[misc,arg-type]

    def _copy_ledger(self) -> None:
        self._ledger.append(read_events_after(self._redis, RUN, self._ledger.position))

    def _wake(self, life: Life, *, until_its_end: bool = False) -> None:
        """Let a paused learner do more, beside its successor: it is fenced off, or has died with the host."""
        while not life.has_ended:
            life.go()
            if not until_its_end:
                break
        if life.error is not None and not isinstance(life.error, FencedError):
            raise life.error
        if life.has_ended:
            self._paused = [each for each in self._paused if each is not life]

    def _play_on(self) -> None:
        for name in NAMES:
            for _ in range(8):
                self._worker_acts(name)

    def _worker_acts(self, name: str) -> None:
        worker, held = self._workers[name], self._held[name]
        with suppress(ReconcileError):  # until a learner has reconciled the data
            for task in self._runner.run(worker.heartbeat(name)).cancelled:
                held.remove(task)
            if not held or self._walk.random() < 0.3:
                held += self._runner.run(worker.claim(name, self._walk.randint(1, 4)))
            if held:
                task = held[self._walk.randrange(len(held))]
                has_signal = task.number % 3 != 1 or self._config.zero_variance != "refill"
                trajectory = trajectory_for(task, worker=name, reward=float(task.index) if has_signal else 1.0)
                self._runner.run(worker.submit(name, task, trajectory))
                held.remove(task)

    # What must hold in the end

    def _is_complete(self) -> None:
        counters = self._run.learner.counters()
        assert counters.trained == STEPS * GROUPS_PER_STEP, counters
        assert not counters.in_flight, counters
        newest = newest_complete(self.checkpoints, "now")
        assert newest is not None
        assert newest.state.step == STEPS
        history = json.loads((newest.path / "weights.json").read_text())
        assert [step for step, _ in history] == list(range(STEPS))
        numbers = [number for _, batch in history for number in batch]
        assert self._redis.hget(KEYS.progress, "version") == str(STEPS).encode()
        self._copy_ledger()
        journal, broken = read_step_ledger(self.folder)
        evidence = Evidence(
            events=read_ledger(self.folder),
            journal=journal,
            checkpoints={STEPS: ""},
            counters=counters,
            groups_per_step=GROUPS_PER_STEP,
            max_steps=STEPS,
            broken_lines=broken,
        )
        result = audit(evidence)
        assert not result.findings, result.findings
        assert numbers == [each.number for line in result.lineage.steps for each in line.groups if each.computed]
        assert max(result.staleness) <= self._bound


class BrokenLifeError(AssertionError):
    """A seed under which whole learners break a promise."""


def live(redis: Redis, url: str, seed: int) -> Counter[str]:
    """Play a seed; return how often what happened. Raises whatever fails, with the seed."""
    world = World(redis, url, seed)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: _fsync(world, descriptor))
            patch.setattr(time, "monotonic", world.monotonic)
            patch.setattr(time, "sleep", world.sleep)
            try:
                world.play()
            finally:
                world.clean_up()
    except Exception as error:
        what = f"seed {seed} of whole learners, {dict(world.happened)}: {type(error).__name__}: {error}"
        raise BrokenLifeError(f"{what}\nreplay: make simulate ARGS='--seed {seed}'") from error
    return world.happened


def _fsync(world: World, descriptor: int) -> None:
    for life in world._lives:
        life.moment()
    world.disk.sync(descriptor)
