"""One learner process from start to exit: ranks, lease, signals, resume.

Invariant: only the holder of the lease reads or writes the run; however the process ends, the next learner can resume
from what it left in Redis and on disk.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from offbeat.services.buffer.group_ledger import LedgerThread
from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.errors import CodecError, ControlError, RetryableError
from offbeat.services.redis.connection import connect
from offbeat.services.redis.lease import LearnerLease, owner_of
from offbeat.services.telemetry import RedisMetrics
from offbeat.services.weights.locality import check_reach
from offbeat.services.weights.publisher import RedisWeightPublisher
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.learner.components import build_components
from offbeat.trainer.learner.evaluations import RedisEvaluationLog
from offbeat.trainer.learner.loop import Learner
from offbeat.trainer.learner.progress_view import LearnerView, SilentView
from offbeat.trainer.learner.reporter import LearnerReporter, RedisStatusBoard
from offbeat.trainer.process import redis_outage
from offbeat.trainer.process.heartbeat import give_signs
from offbeat.trainer.process.lease_wait import wait_for_lease
from offbeat.trainer.process.ranks import (
    FollowerRanks,
    RankZeroTrainer,
    die_with_leader,
    follow_rank_zero,
    peers,
)
from offbeat.trainer.process.signals import stopping_on_signals
from offbeat.trainer.process.watchdog import Watchdog, kill_if_hung
from offbeat.trainer.run import LearnerRun, ends, read_run
from offbeat.trainer.trackers.metrics_writer import MetricsWriter
from offbeat.trainer.trackers.supervisor import TrackerProcesses, make_start_messages
from offbeat.trainer.training.batch_log import BatchLog, RecordingTrainer
from offbeat.trainer.training.checkpoint import Checkpoint, CheckpointStore, read_checkpoint
from offbeat.trainer.training.policy_trainer import PolicyTrainer, Trainer

logger = logging.getLogger(__name__)

SILENT_TIMEOUTS = 4
"""Multiple of `buffer.learner_timeout_s` after which a silent rank counts as hung."""
OTHERS_FIRST_S = 60.0
"""A call of several ranks ends by its own timeout before rank 0 is taken for hung in it."""


@dataclass(frozen=True, slots=True)
class LearnerResult:
    """Result of a learner that ended without an error."""

    finished: bool = False
    """All steps are trained and evaluated."""
    interrupted: bool = False
    """True if stopped by a signal; otherwise the run's record ended it."""
    step: int = -1
    """Optimizer batches behind the weights; -1 if it never had weights."""
    checkpoint: Path | None = None
    """The newest one, if there is any."""


class LearnerProcess:
    """One rank of a learner: rank 0 holds the lease and runs the loop, the other ranks follow it."""

    def __init__(
        self,
        run: LearnerRun,
        redis_url: str,
        *,
        num_processes: int,
        follower: Sequence[str],
        view: LearnerView | None = None,
        started: float,
    ) -> None:
        """follower: command line of the other ranks. started: monotonic time at which this process began."""
        self._run = run
        self._num_processes = num_processes
        self._follower = follower
        self._view = view or SilentView()
        hung_s = 60 * run.config.actor_train.backend_timeout + (OTHERS_FIRST_S if num_processes > 1 else 0.0)
        self._watchdog = Watchdog(hung_s)
        self._stop = threading.Event()
        self._lost = threading.Event()
        waiting = redis_outage.RedisOutage(self._may_wait, self._watchdog.sign, self._view.say)
        self._redis = connect(redis_url, patience_s=redis_outage.PATIENCE_S, goes_on=waiting.should_retry)
        self._metrics = RedisMetrics(self._redis, run.run_id)
        board = RedisStatusBoard(self._redis, run.run_id)
        self._reporter = LearnerReporter(self._metrics, board, self._view, self._watchdog.sign)
        self._peers = FollowerRanks()
        self._silent_s = SILENT_TIMEOUTS * run.config.buffer.learner_timeout_s
        self._laps = _StartupTimer(started)

    def run(self) -> LearnerResult:
        """Train until the last step, a signal, or the end of the run.

        Raises:
            FencedError: another learner has taken the run.
            RetryableError, redis.ConnectionError: Redis was unusable when a signal arrived, or the run was started anew
            while this learner
                was standing by.
            RankDiedError: one of the other ranks has ended.
            CheckpointError, ControlError, WeightsError: the checkpoint, the policy, the warm start or the transport
            can't be used on this
                host.
        """
        config = self._run.config.actor_train
        torch.set_num_threads(config.num_threads)
        torch.manual_seed(self._run.config.seed)
        if int(os.environ.get("RANK", "0")) > 0:
            die_with_leader()
            give_signs(self._silent_s)
            with process_group(ranks_of_environment(config.device), config.backend_timeout) as ranks:
                follow_rank_zero(PolicyTrainer(self._run, ranks), ranks)
            return LearnerResult()
        with (
            self._redis,
            stopping_on_signals(self._interrupt),
            peers(self._num_processes, self._follower, self._silent_s) as self._peers,
            kill_if_hung(self._watchdog),
        ):
            try:
                return self._lead(ranks_of_environment(config.device))
            except (RuntimeError, ControlError):
                self._peers.raise_if_rank_died()
                raise

    def _may_wait(self) -> bool:
        """Return True if an unusable Redis should be waited for: it can't report either whether the run is to end."""
        return not self._stop.is_set() and not self._lost.is_set()

    def _interrupt(self) -> None:
        self._stop.set()
        self._view.say("Finishing the running step, then saving a checkpoint ... (Ctrl-C again ends at once)")

    def _lead(self, place: Ranks) -> LearnerResult:
        self._laps.lap("imports")
        timeout_s = self._run.config.buffer.learner_timeout_s
        owner = owner_of(os.getpid())
        lease = LearnerLease(self._redis, self._run.run_id, owner, timeout_s, on_lost=self._lost.set)
        self._view.phase("loading the policy")
        with process_group(place, self._run.config.actor_train.backend_timeout) as ranks:
            with _unusable("the policy can't be built"):
                trainer = PolicyTrainer(self._run, ranks, self._watchdog.sign)
            self._laps.lap("engine")
            self._view.phase("taking the lease")
            leading = RankZeroTrainer(trainer, ranks)
            if wait_for_lease(lease, self._view, self._is_over):
                self._laps.lap("lease")
                with lease:
                    ended = self._train(leading, trainer.vocab_size, lease, ranks)
                    lease.check()
            else:
                ended = LearnerResult(interrupted=self._stop.is_set())
            leading.stop_followers()
        return ended

    def _check_unchanged(self) -> None:
        """Raise if the run was started anew while this learner was standing by."""
        if read_run(self._redis, self._run.run_id) != self._run:
            raise RetryableError(
                "the run was started anew with another configuration while this learner stood by: attach again"
            )

    def _train(self, trainer: RankZeroTrainer, vocab_size: int, lease: LearnerLease, ranks: Ranks) -> LearnerResult:
        run, epoch = self._run, lease.epoch
        self._check_unchanged()
        if self._is_over():
            return LearnerResult(interrupted=self._stop.is_set())
        self._reporter.doing("resume", step=0)
        publisher = RedisWeightPublisher(
            self._redis, run.run_id, run.config.weights, epoch, run.output_dir, run.config.adapter_settings
        )
        try:
            buffer = RedisLearnerBuffer(self._redis, run.run_id, epoch, order=run.config.buffer.order)
            recorder = RecordingTrainer(
                trainer,
                BatchLog(run.output_dir, run.config.record_batches),
                run.config.settings.learning_rate,
                every=run.config.record_batches > 0,
            )
            learner = self._learner(recorder, vocab_size, publisher, buffer, ranks)
            checkpoint = self._checkpoint()
            resumed_step = 0
            if checkpoint is not None:
                self._resume(learner, checkpoint, ranks)
                resumed_step = checkpoint.state.step
            elif not self._begin(trainer, learner, buffer.counters().trained):
                return LearnerResult(interrupted=self._stop.is_set())
            self._reporter.stage(self._laps.seconds)
            names, kwargs = run.config.track_with, run.config.tracker_kwargs
            with (
                TrackerProcesses(make_start_messages(run, resumed_step), self._view.say, self._metrics) as trackers,
                MetricsWriter(self._redis, run.run_id, run.output_dir, names, resumed_step, kwargs),
                LedgerThread(self._redis, run.run_id, run.output_dir),
            ):
                finished = learner.run()
                trackers.ending = "finished" if finished else "stopped"
                if not finished:
                    self._reporter.phase("stopped")
            return LearnerResult(finished, self._stop.is_set(), learner.step, learner.saved_at)
        finally:
            publisher.close()

    def _resume(self, learner: Learner, checkpoint: Checkpoint, ranks: Ranks) -> None:
        self._view.say(f"Goes on from step {checkpoint.state.step}: {checkpoint.path}")
        written_by, train = checkpoint.state.num_processes, self._run.config.actor_train
        zero = train.strategy_args.strategy_name == "deepspeed_train"
        sharded = zero and (train.strategy_args.zero_stage > 0 or train.model_args.dtype == "bfloat16")
        if sharded and written_by != ranks.world_size:
            raise ControlError(
                f"{checkpoint.path} was written by {written_by} process(es), whose shares of the optimizer can't be dealt "
                f"out to {ranks.world_size}: take {written_by} (--nproc or actor_train.num_processes)"
            )
        with _unusable(f"{checkpoint.path} can't be loaded"):
            learner.resume(checkpoint)
        self._laps.lap("resume")

    def _begin(self, trainer: RankZeroTrainer, learner: Learner, groups_trained: int) -> bool:
        """First weights; False if stopped before they were there."""
        if groups_trained:
            raise ControlError(
                f"{groups_trained} groups are trained and gone from the buffer, and {self._run.checkpoints} on "
                f"{socket.gethostname()} holds no checkpoint with them: learners on several hosts need one output_dir"
            )
        warm = self._run.config.warm_start is not None
        self._reporter.phase("warming up" if warm else "preparing the first weights")
        with _unusable("the first weights can't be made"):
            begun = trainer.begin(self._show_warm_start, self._is_over)
        if not begun:
            return False
        self._laps.lap("warm_start")
        if warm:
            learner.save_start()
            self._laps.lap("save_start")
        return True

    def _show_warm_start(self, done: int, total: int) -> None:
        self._reporter.phase(f"warming up {done}/{total}")

    def _learner(
        self,
        trainer: Trainer,
        vocab_size: int,
        publisher: RedisWeightPublisher,
        buffer: RedisLearnerBuffer,
        ranks: Ranks,
    ) -> Learner:
        run = self._run
        parts = build_components(
            run,
            trainer=trainer,
            vocab_size=vocab_size,
            publisher=publisher,
            buffer=buffer,
            checkpoints=CheckpointStore(run.checkpoints, run.config.max_ckpt_to_keep),
            sink=self._metrics,
            log=RedisEvaluationLog(self._redis, run.run_id),
            reporter=self._reporter,
            stopped=self._is_over,
        )
        return Learner(run, parts, num_processes=ranks.world_size)

    def _is_over(self) -> bool:
        """Return True if a signal, another learner or the run's record ends this learner.

        Raises:
            RankDiedError: one of the other ranks has ended.
            WeightsError: a replica can't be reached by the run's transport.
        """
        self._watchdog.sign()
        self._peers.check()
        check_reach(self._redis, self._run.run_id, self._run.config.weights)
        return self._stop.is_set() or self._lost.is_set() or ends(self._redis, self._run.run_id)

    def _checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint to resume from: this run's, the newest with `true`, or the one that the configuration
        names."""
        wanted = self._run.config.resume_from_checkpoint
        store = CheckpointStore(self._run.checkpoints, self._run.config.max_ckpt_to_keep)
        newest = store.newest_complete(None if wanted is True else self._run.lineage)
        return read_checkpoint(wanted) if newest is None and isinstance(wanted, Path) else newest


@contextmanager
def _unusable(what: str) -> Iterator[None]:
    """Translate failures that would repeat; running out of memory may not."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ValueError, RuntimeError, OSError, ImportError, CodecError) as error:
        raise ControlError(f"{what}: {error}") from error


class _StartupTimer:
    """Durations of the startup phases, s."""

    def __init__(self, started: float) -> None:
        self._at = started
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._at = now - self._at, now
