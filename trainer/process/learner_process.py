"""One learner process.

Invariant: only the lease holder reads or writes the run; after any exit, the next learner can resume.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from offbeat.services.buffer.group_ledger import LedgerThread
from offbeat.services.buffer.incarnation_watch import IncarnationWatch
from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.buffer.scores import RedisGroupScores
from offbeat.services.device_turns import LearnerTurns
from offbeat.services.errors import CodecError, ControlError, RetryableError
from offbeat.services.redis.connection import connect
from offbeat.services.redis.errors import complaint
from offbeat.services.redis.incarnation import KnownIncarnation
from offbeat.services.redis.lease import LearnerLease, owner_of
from offbeat.services.redis.run_writes import RunWrites
from offbeat.services.telemetry import RedisMetrics
from offbeat.services.weights.locality import check_reach
from offbeat.services.weights.publisher import RedisWeightPublisher
from offbeat.trainer.engines.node_ranks import NodeRanks
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.learner.components import build_components
from offbeat.trainer.learner.evaluations import RedisEvaluationLog
from offbeat.trainer.learner.loop import Learner
from offbeat.trainer.learner.progress_view import LearnerView, SilentView
from offbeat.trainer.learner.reporter import LearnerReporter, RedisStatusBoard
from offbeat.trainer.learner.step_ledger import StepLedger, newest_epoch, note_lease
from offbeat.trainer.learner.uploads import CheckpointUploads
from offbeat.trainer.process import outage
from offbeat.trainer.process.heartbeat import HEARTBEAT_TIMEOUTS, start_heartbeats
from offbeat.trainer.process.lease_wait import wait_for_lease
from offbeat.trainer.process.rank_processes import FollowerRanks, die_with_rank_zero, start_followers
from offbeat.trainer.process.ranks import follow_rank_zero, lead
from offbeat.trainer.process.remote_ranks import RemoteRanks
from offbeat.trainer.process.run_checkpoints import RunCheckpoints, StoppedError, check_processes, wait_for_room
from offbeat.trainer.process.signals import stop_on_signals
from offbeat.trainer.rendering.evaluations import rendered_evaluations
from offbeat.trainer.run import LearnerRun, buffer_limits, is_ending, read_run
from offbeat.trainer.trackers.base import LoggedSteps
from offbeat.trainer.trackers.metrics_writer import MetricsWriter
from offbeat.trainer.trackers.supervisor import TrackerProcesses, make_start_messages
from offbeat.trainer.training.checkpoint import Checkpoint, read_epoch
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from offbeat.trainer.training.critic_trainer import CriticTrainer
from offbeat.trainer.training.policy_trainer import PolicyTrainer
from offbeat.trainer.training.score_keys import describe_start, selection_digest, start_key
from offbeat.trainer.training.trainer import Trainer
from offbeat.trainer.watchdog import Watchdog, kill_if_hung

logger = logging.getLogger(__name__)

COLLECTIVE_MARGIN_S = 60.0
"""Watchdog's timeout beyond that of collective calls."""
NEW_STORE_OUTAGE_AFTER_S = 300.0
"""More than a store library's own retries take."""


@dataclass(frozen=True, slots=True)
class LearnerResult:
    finished: bool = False
    """After all steps and evaluations."""
    interrupted: bool = False
    """Stopped by a signal, not by the run's record."""
    step: int = -1
    """Version of the weights; -1 without."""
    checkpoint: Path | str | None = None
    """Newest folder, or its URL in the store."""


class LearnerProcess:
    """One rank; rank 0 runs the loop."""

    def __init__(
        self,
        run: LearnerRun,
        redis_url: str,
        *,
        num_processes: int,
        follower: Sequence[str],
        view: LearnerView | None = None,
        started: float,
        ranks_per_node: Sequence[NodeRanks] = (),
    ) -> None:
        """follower: other ranks' command line. started: monotonic time. ranks_per_node: of several nodes, this one
        first."""
        self._run = run
        self._num_processes = num_processes
        self._follower = follower
        self._others = RemoteRanks(redis_url, run.run_id, ranks_per_node) if len(ranks_per_node) > 1 else None
        self._view = view or SilentView()
        margin_s = COLLECTIVE_MARGIN_S if num_processes > 1 else 0.0
        self._watchdog = Watchdog(60 * run.config.actor_train.backend_timeout + margin_s)
        self._stop = threading.Event()
        self._lost = threading.Event()
        stops, patience_s = (self._stop, self._lost), outage.RETRY_TIMEOUT_S
        redis_outage = outage.Outage(
            "Redis", stops, self._watchdog, self._view, describe=complaint, failure_s=patience_s
        )
        self._store_outage = outage.Outage(
            "Weights store", stops, self._watchdog, self._view, new_after_s=NEW_STORE_OUTAGE_AFTER_S
        )
        self._redis = connect(
            redis_url,
            patience_s=patience_s,
            should_retry=redis_outage.should_retry,
            run_id=run.run_id,
        )
        self._known = KnownIncarnation(self._redis, run.run_id, run.uid)
        self._metrics = RedisMetrics(self._redis, run.run_id, run.uid)
        self._board = RedisStatusBoard(self._redis, run.run_id, run.uid)
        self._reporter = LearnerReporter(self._metrics, self._board, self._view, self._watchdog, run.config.limits)
        self._followers = FollowerRanks()
        self._turns: LearnerTurns | None = None
        self._heartbeat_timeout_s = HEARTBEAT_TIMEOUTS * run.config.buffer.learner_timeout_s
        self._startup = _StartupTimer(started)

    def run(self) -> LearnerResult:
        """Train until the last step, a signal, or the run's end.

        Raises:
            FencedError: another learner holds the run.
            RetryableError, redis.ConnectionError: Redis or the weights store unusable at a signal, or run restarted during
                standby.
            RankDiedError: another rank has died.
            CheckpointError, ControlError, WeightsError: checkpoint, policy, warm start or transport unusable on this
                host.
        """
        config = self._run.config.actor_train
        torch.set_num_threads(config.num_threads)
        torch.manual_seed(self._run.config.seed)
        if int(os.environ.get("RANK", "0")) > 0:
            die_with_rank_zero()
            start_heartbeats(self._heartbeat_timeout_s)
            with process_group(ranks_of_environment(config.device), config.backend_timeout) as ranks:
                trainer = CriticTrainer(self._run, ranks) if ranks.is_critic else PolicyTrainer(self._run, ranks)
                follow_rank_zero(trainer, ranks, self._run.config)
            return LearnerResult()
        with (
            self._redis,
            stop_on_signals(self._interrupt),
            start_followers(
                self._num_processes, self._follower, self._heartbeat_timeout_s, self._others
            ) as self._followers,
            kill_if_hung(self._watchdog),
        ):
            try:
                return self._lead(ranks_of_environment(config.device))
            except (RuntimeError, ControlError):
                self._followers.raise_if_rank_died()
                raise

    def _interrupt(self) -> None:
        self._stop.set()
        self._view.print("Finishing the running step, then saving a checkpoint ... (Ctrl-C again exits at once)")

    def _lead(self, ranks: Ranks) -> LearnerResult:
        self._startup.lap("imports")
        timeout_s = self._run.config.buffer.learner_timeout_s
        owner = owner_of(os.getpid())
        lease = LearnerLease(
            self._redis,
            self._run.run_id,
            owner,
            timeout_s,
            on_lost=self._lost.set,
            run_uid=self._run.uid,
            newest_epoch=lambda: max(read_epoch(self._run.checkpoints), newest_epoch(self._run.output_dir)),
        )
        with ExitStack() as stack:
            # Where engines are on the devices, a learner on standby must not be
            if self._run.config.takes_turns and not self._acquire(lease, stack):
                self._followers.kill()  # they wait for the process group
                return LearnerResult(interrupted=self._stop.is_set())
            self._view.show_phase("loading the policy")
            ranks = stack.enter_context(process_group(ranks, self._run.config.actor_train.backend_timeout))
            with _as_control_error("the policy can't be built"):
                trainer = PolicyTrainer(self._run, ranks, self._watchdog)
            self._startup.lap("engine")
            leader = stack.enter_context(lead(trainer, ranks))
            if not self._run.config.takes_turns and not self._acquire(lease, stack):
                return LearnerResult(interrupted=self._stop.is_set())
            try:
                result = self._train(leader, trainer.vocab_size, lease, ranks)
            except StoppedError:
                result = LearnerResult(interrupted=self._stop.is_set())
            lease.check()
        return result

    def _acquire(self, lease: LearnerLease, stack: ExitStack) -> bool:
        """Hold the lease until the stack unwinds, and the devices where engines share them; return False if stopped."""
        self._view.show_phase("acquiring the lease")
        if not wait_for_lease(lease, self._view, self._should_stop):
            return False
        stack.enter_context(lease)
        if self._run.config.takes_turns:
            self._view.show_phase("waiting until the engines sleep")
            run, lease_s = self._run, self._run.config.buffer.learner_timeout_s
            self._turns = LearnerTurns(self._redis, run.run_id, run.uid, lease.epoch, lease_s)
            if not self._turns.begin(self._should_stop):
                return False
        self._startup.lap("lease")
        return True

    def _check_unchanged(self) -> None:
        if read_run(self._redis, self._run.run_id) != self._run:
            raise RetryableError(
                "the run was restarted with another configuration while this learner was on standby: attach again"
            )

    def _train(self, trainer: Trainer, vocab_size: int, lease: LearnerLease, ranks: Ranks) -> LearnerResult:
        run, epoch = self._run, lease.epoch
        wait_for_room(partial(note_lease, run.output_dir, epoch), run.output_dir, self._reporter, self._should_stop)
        self._check_unchanged()
        if self._should_stop():
            return LearnerResult(interrupted=self._stop.is_set())
        self._board.hold(epoch)
        self._reporter.set_activity("resume", step=0)
        publisher = RedisWeightPublisher(
            self._redis,
            run.run_id,
            run.config.weights,
            epoch,
            run.output_dir,
            run.config.adapter_settings,
            self._known,
            has_replicas=run.config.uses_engine,
            should_retry=self._store_outage.should_retry,
        )
        try:
            buffer = RedisLearnerBuffer(
                self._redis,
                run.run_id,
                epoch,
                order=run.config.buffer.order,
                known=self._known,
                limits=buffer_limits(run.config),
                reclaim=lease.reclaim,
            )
            checkpoints = RunCheckpoints(run, epoch, self._reporter, self._should_stop)
            checkpoint = checkpoints.find()
            uploads = checkpoints.start_uploads()
            learner, ledger = self._build_learner(
                trainer, vocab_size, publisher, buffer, checkpoints.local, uploads, ranks
            )
            resumed_step = 0
            if checkpoint is not None:
                if not self._resume(learner, checkpoint, ranks):
                    return LearnerResult(interrupted=self._stop.is_set())
                resumed_step = checkpoint.state.step
            elif not self._begin(trainer, learner, buffer.counters().trained):
                return LearnerResult(interrupted=self._stop.is_set())
            self._announce_start(epoch)
            self._reporter.record_startup(self._startup.seconds)
            names, kwargs = run.config.track_with, run.config.tracker_kwargs
            logged = LoggedSteps(run.config.logging_steps, run.config.max_steps)
            with (
                closing(ledger),
                TrackerProcesses(make_start_messages(run, resumed_step), self._view.print, self._metrics) as trackers,
                MetricsWriter(self._redis, run.run_id, run.output_dir, names, resumed_step, kwargs, logged, run.uid),
                LedgerThread(self._redis, run.run_id, run.output_dir),
                IncarnationWatch(buffer),
                rendered_evaluations(run),
            ):
                finished = learner.run()
                trackers.ending = "finished" if finished else "stopped"
                if not finished:
                    self._reporter.set_phase("stopped")
            return LearnerResult(finished, self._stop.is_set(), learner.step, learner.newest_checkpoint)
        finally:
            publisher.close()

    def _resume(self, learner: Learner, checkpoint: Checkpoint, ranks: Ranks) -> bool:
        self._view.print(f"Resuming from step {checkpoint.state.step}: {checkpoint.path}")
        check_processes(self._run.config, checkpoint, ranks.world_size, len(ranks.critics))
        with _as_control_error(f"{checkpoint.path} can't be loaded"):
            is_resumed = learner.resume(checkpoint, self._show_scoring)
        self._startup.lap("resume")
        return is_resumed

    def _begin(self, trainer: Trainer, learner: Learner, groups_trained: int) -> bool:
        if groups_trained:
            raise ControlError(
                f"{groups_trained} trained groups were removed from the buffer, but {self._run.checkpoints} on "
                f"{socket.gethostname()} has no checkpoint with them: learners on several hosts need a shared output_dir"
            )
        warm = self._run.config.warm_start is not None
        self._reporter.set_phase("warming up" if warm else "preparing the first weights")
        with _as_control_error("the first weights can't be created"):
            begun = trainer.begin(self._show_warm_start if warm else self._show_scoring, self._should_stop)
        if not begun:
            return False
        self._startup.lap("warm_start")
        if warm:
            learner.save_start()
            self._startup.lap("save_start")
        return True

    def _announce_start(self, epoch: int) -> None:
        """Announce to scorers that the first weights are complete."""
        write = RunWrites(self._redis, self._run.run_id, self._run.uid)
        write.epoch = epoch
        write("SET", start_key(self._run.run_id), describe_start(self._run))

    def _show_warm_start(self, done: int, total: int) -> None:
        self._reporter.set_phase(f"warming up {done}/{total}")

    def _show_scoring(self, done: int, total: int) -> None:
        self._reporter.set_phase(f"scoring rows by the reference {done}/{total}")

    def _build_learner(
        self,
        trainer: Trainer,
        vocab_size: int,
        publisher: RedisWeightPublisher,
        buffer: RedisLearnerBuffer,
        checkpoints: CheckpointStore,
        uploads: CheckpointUploads | None,
        ranks: Ranks,
    ) -> tuple[Learner, StepLedger]:
        run = self._run
        components = build_components(
            run,
            trainer=trainer,
            vocab_size=vocab_size,
            publisher=publisher,
            buffer=buffer,
            checkpoints=checkpoints,
            uploads=uploads,
            sink=self._metrics,
            log=RedisEvaluationLog(self._redis, run.run_id, run.uid),
            reporter=self._reporter,
            scores=RedisGroupScores(self._redis, run.run_id, selection_digest(run.config)),
            turns=self._turns,
            should_stop=self._should_stop,
        )
        learner = Learner(run, components, num_processes=ranks.world_size, num_critic_processes=len(ranks.critics))
        return learner, components.ledger

    def _should_stop(self) -> bool:
        self._watchdog.kick()
        self._followers.check()
        check_reach(self._redis, self._run.run_id, self._run.config.weights)
        return self._stop.is_set() or self._lost.is_set() or is_ending(self._redis, self._run.run_id)


@contextmanager
def _as_control_error(problem: str) -> Iterator[None]:
    """Translate failures that a restart would repeat."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ValueError, RuntimeError, OSError, ImportError, CodecError) as error:
        raise ControlError(f"{problem}: {error}") from error


class _StartupTimer:
    def __init__(self, started: float) -> None:
        self._at = started
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._at = now - self._at, now
