"""One learner process from its first import to its last word: ranks, lease, signals, resume.

Invariant: only the holder of the lease reads or writes the run; whatever ends the process, what it leaves in Redis and on
disk is what the next learner goes on from.
"""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from redis import Redis

from services.buffer.learner import ENDINGS, RedisLearnerBuffer
from services.errors import ControlError
from services.keys import RunKeys
from services.lease import LearnerLease
from services.telemetry import RedisMetrics
from services.weights.publisher import RedisWeightPublisher
from trainer.checkpoint import Checkpoint, CheckpointStore, read_checkpoint
from trainer.engines.processes import Ranks, process_group, ranks_of_environment
from trainer.evaluations import Evaluations, RedisEvaluationLog
from trainer.intake import Intake
from trainer.loop import Learner, Parts
from trainer.peers import LeadingTrainer, die_with_leader, follow, peers
from trainer.policy_trainer import PolicyTrainer
from trainer.reporting import RedisBoard, Reporter
from trainer.run import LearnerRun
from trainer.trackers import TrackerThread

logger = logging.getLogger(__name__)

EVALUATIONS = "evaluations"


class LearnerProcess:
    """Rank 0 leads: it holds the lease and runs the loop. Other ranks follow it."""

    def __init__(self, run: LearnerRun, redis: Redis, redis_url: str, started: float) -> None:
        self._run = run
        self._redis = redis
        self._command = [sys.executable, "-m", "trainer.cli", run.run_id, "--redis", redis_url]
        self._reporter = Reporter(RedisMetrics(redis, run.run_id), RedisBoard(redis, run.run_id))
        self._stop = threading.Event()
        self._laps = _Laps(started)

    def run(self) -> None:
        """Train until the end or a signal.

        Raises:
            FencedError: another learner has taken the run.
            RetryableError: another learner holds it.
            CheckpointError, ControlError: the checkpoint, the policy or the warm start can't be used.
        """
        config = self._run.config.actor_train
        torch.set_num_threads(config.num_threads)
        torch.manual_seed(self._run.config.seed)
        if int(os.environ.get("RANK", "0")) > 0:
            die_with_leader()
            with process_group(ranks := ranks_of_environment(config.device)):
                follow(PolicyTrainer(self._run, ranks), ranks)
            return
        with self._signals(), peers(config.num_processes, self._command):
            self._lead(ranks_of_environment(config.device))

    def _lead(self, ranks: Ranks) -> None:
        self._laps.lap("imports")
        timeout_s = self._run.config.buffer.learner_timeout_s
        owner = f"{socket.gethostname()}:{os.getpid()}"
        lease = LearnerLease(self._redis, self._run.run_id, owner, timeout_s, on_lost=self._stop.set)
        with process_group(ranks):
            with _unusable("the policy can't be built"):
                trainer = PolicyTrainer(self._run, ranks)
            self._laps.lap("engine")
            lease.acquire(wait_s=timeout_s + 2.0)
            self._laps.lap("lease")
            leading = LeadingTrainer(trainer, ranks)
            with lease:
                self._train(leading, trainer.vocab_size, lease)
                lease.check()
            leading.dismiss()

    def _train(self, trainer: LeadingTrainer, vocab_size: int, lease: LearnerLease) -> None:
        run, epoch = self._run, lease.epoch
        publisher = RedisWeightPublisher(self._redis, run.run_id, run.config.weights, epoch, run.output_dir)
        try:
            learner = self._learner(trainer, vocab_size, publisher, epoch)
            checkpoint = self._checkpoint()
            resumed_step = 0
            if checkpoint is not None:
                with _unusable(f"{checkpoint.path} can't be loaded"):
                    learner.resume(checkpoint)
                resumed_step = checkpoint.state.step
                self._laps.lap("resume")
            elif not self._begin(trainer, learner):
                return
            self._reporter.stage(self._laps.seconds)
            names = run.config.track_with
            with TrackerThread(self._redis, run.run_id, run.output_dir, names, resumed_step):
                finished = learner.run()
                if not finished:
                    self._reporter.phase("stopped")
        finally:
            publisher.close()

    def _begin(self, trainer: LeadingTrainer, learner: Learner) -> bool:
        """First weights; False if stopped before they were there."""
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
        self, trainer: LeadingTrainer, vocab_size: int, publisher: RedisWeightPublisher, epoch: int
    ) -> Learner:
        run, config = self._run, self._run.config
        sink = RedisMetrics(self._redis, run.run_id)
        buffer = RedisLearnerBuffer(self._redis, run.run_id, epoch)
        log = RedisEvaluationLog(self._redis, run.run_id)
        parts = Parts(
            buffer=buffer,
            publisher=publisher,
            trainer=trainer,
            checkpoints=CheckpointStore(run.checkpoints, config.max_ckpt_to_keep),
            evaluations=Evaluations(buffer, sink, log, run.output_dir / EVALUATIONS),
            intake=Intake(
                buffer=buffer,
                config=config,
                groups_per_step=config.groups_per_step,
                max_staleness=config.max_staleness,
                train_stale=config.buffer.stale_policy == "train",
                vocab_size=vocab_size,
            ),
            reporter=self._reporter,
            stopped=self._is_over,
        )
        return Learner(run, parts)

    def _is_over(self) -> bool:
        """Whether a signal or the run's record says that the learner should end."""
        return self._stop.is_set() or self._redis.hget(RunKeys(self._run.run_id).record, "wanted") in ENDINGS

    def _checkpoint(self) -> Checkpoint | None:
        """Where to go on from: of this run, of any with `true`, or the one that the user names."""
        wanted = self._run.config.resume_from_checkpoint
        store = CheckpointStore(self._run.checkpoints, self._run.config.max_ckpt_to_keep)
        newest = store.newest_complete(None if wanted is True else self._run.lineage)
        return read_checkpoint(wanted) if newest is None and isinstance(wanted, Path) else newest

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C let the running step end; a second one ends the process as usual."""

        def stop(number: int, _: object) -> None:
            logger.info("signal %d: ends after the running step", number)
            self._stop.set()
            signal.signal(number, signal.SIG_DFL)

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[int, Callable[..., object] | int | None] = {
            number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _unusable(what: str) -> Iterator[None]:
    """Tell failures that would come again in the same way from others; memory that is short may not be the next time."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        raise ControlError(f"{what}: {error}") from error


class _Laps:
    """How long each part of the start took, s."""

    def __init__(self, started: float) -> None:
        self._at = started
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._at = now - self._at, now
