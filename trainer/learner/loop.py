"""The learner's loop: take, train, publish, evaluate, checkpoint, acknowledge.

Invariants: a version's number is that of the optimizer steps behind it; only groups in a durable checkpoint are
acknowledged; a resumed learner repeats later steps on the same groups. A Redis that lost data is reconciled with the
surviving lineage.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from offbeat.services.buffer.api import LearnerBuffer, Proof, Reconciled
from offbeat.services.errors import ControlError
from offbeat.services.live_settings import requested_settings, settings_at
from offbeat.services.log_format import set_process_log_fields
from offbeat.services.tracing.api import NoStepTracer, StepTracer
from offbeat.services.weights.api import WeightPublisher
from offbeat.trainer.data.replay_buffer import ReplayBuffer, ReplayedGroups
from offbeat.trainer.learner.checkpointing import Checkpointer
from offbeat.trainer.learner.evaluations import Evaluation, Evaluations, When
from offbeat.trainer.learner.group_intake import GroupIntake
from offbeat.trainer.learner.reporter import LearnerReporter, find_skips, is_overflow, replay_values, step_values
from offbeat.trainer.learner.shared_devices import SharedDevices, Turns
from offbeat.trainer.learner.staleness_controller import StalenessController
from offbeat.trainer.learner.step_groups import StepGroups
from offbeat.trainer.learner.step_ledger import StepLedger
from offbeat.trainer.learner.task_sampler import Curriculum
from offbeat.trainer.learner.trajectory_samples import TrajectorySampler
from offbeat.trainer.learner.uploads import FOREGROUND_TIMEOUT_S, STOP_TIMEOUT_S, CheckpointUploads
from offbeat.trainer.learner.validation import ValidationRows
from offbeat.trainer.run import FINISHED, LearnerRun
from offbeat.trainer.training.batch_log import BatchLog
from offbeat.trainer.training.checkpoint import Checkpoint, LearnerState
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from offbeat.trainer.training.trainer import Trainer

logger = logging.getLogger(__name__)

UNNEEDED = "unneeded"
"""Reason of a drop: in flight after the last step, after a loss in Redis."""
PAUSE_POLL_S = 0.2
"""Maximum delay of a resume or stop."""


@dataclass(frozen=True, slots=True)
class LearnerComponents:
    buffer: LearnerBuffer
    publisher: WeightPublisher
    trainer: Trainer
    checkpoints: CheckpointStore
    uploads: CheckpointUploads | None
    batch_log: BatchLog
    evaluations: Evaluations
    intake: GroupIntake
    reporter: LearnerReporter
    ledger: StepLedger
    replay: ReplayBuffer
    staleness: StalenessController
    curriculum: Curriculum
    sampler: TrajectorySampler
    should_stop: Callable[[], bool]
    validation: ValidationRows = field(default_factory=lambda: ValidationRows([]))
    tracer: StepTracer = field(default_factory=NoStepTracer)
    turns: Turns | None = None
    """With engines on the learner's devices, held at first; None: no engine shares them."""
    num_val_prompts: int | None = None
    """Rows that each evaluation answers once; None: the configured numbers of episodes."""


class Learner:
    def __init__(
        self,
        run: LearnerRun,
        components: LearnerComponents,
        *,
        num_processes: int = 1,
        num_critic_processes: int = 0,
    ) -> None:
        self._num_processes = num_processes
        self._num_critic_processes = num_critic_processes
        self._lineage = run.lineage
        self._config = run.config
        self._buffer = components.buffer
        self._publisher = components.publisher
        self._trainer = components.trainer
        self._devices = SharedDevices(components.trainer, components.turns)
        self._batch_log = components.batch_log
        self._evaluations = components.evaluations
        self._intake = components.intake
        self._reporter = components.reporter
        self._ledger = components.ledger
        self._replay = components.replay
        self._staleness = components.staleness
        self._curriculum = components.curriculum
        self._sampler = components.sampler
        self._should_stop = components.should_stop
        self._validation = components.validation
        self._num_val_prompts = components.num_val_prompts
        self._uploads = components.uploads
        self._tracer = components.tracer
        self._checkpointer = Checkpointer(
            components.checkpoints,
            components.buffer,
            components.ledger,
            components.reporter,
            run.config.save_steps,
            tolerant=num_processes + num_critic_processes == 1,
            on_durable=self._upload,
        )
        self._step = self._next_number = self._num_skipped = 0
        self._seconds: dict[str, float] = {}
        self._settings = run.config.settings
        self._admission_bound = run.config.settings.max_staleness
        self._loaded: LearnerState | None = None
        self._is_new_lineage = False
        self._published = -1
        self._newest_version = -1
        """By earlier learners."""

    @property
    def step(self) -> int:
        """Return the optimizer steps behind the weights."""
        return self._step

    @property
    def newest_checkpoint(self) -> Path | str | None:
        newest = self._checkpointer.newest
        is_local = newest is not None and newest.is_dir()
        return newest if is_local or self._uploads is None else self._uploads.newest_url or newest

    def resume(self, checkpoint: Checkpoint, progress: Callable[[int, int], None] = lambda *_: None) -> bool:
        """Load a checkpoint; return False if stopped. `run` acknowledges its groups again."""
        state = checkpoint.state
        if self._config.resume_from_checkpoint is True:
            self._lineage = state.lineage  # differs from the run's if it was resumed from an earlier step before
        elif state.lineage != self._lineage:
            self._is_new_lineage = True
        self._replay.load(checkpoint.path, self._intake.can_train)
        self._staleness.load(checkpoint.path, state.step, is_own=not self._is_new_lineage)
        self._curriculum.load(checkpoint.path)
        self._reporter.load(checkpoint.path, is_own=not self._is_new_lineage)
        self._loaded, self._step, self._next_number = state, state.step, state.next_number
        self._checkpointer.resume_from(checkpoint)
        logger.info("resuming from %s", checkpoint.path)
        return self._trainer.load(checkpoint.path, state.kl_coef, progress, self._should_stop)

    def save_start(self) -> None:
        """Save the first weights, for restarts."""
        self._checkpoint()
        self._finish_checkpoint()

    def run(self) -> bool:
        """Train to the last step; return False if stopped. The last step has a checkpoint, unless stopped with a full
        disk.

        Raises:
            ControlError: too many consecutive non-finite gradients.
            UnsavedError: no checkpoint within the time limit.
        """
        with closing(self._tracer):
            finished = self._run()
        self._devices.leave()
        return finished

    def _run(self) -> bool:
        self._begin()
        self._publish()
        if self._step == 0:
            self._evaluate("before", greedy=True, num_episodes=self._config.final_val_batch_size)
        while self._step < self._config.max_steps and self._train_step():
            self._evaluations.collect()
            if self._step < self._config.max_steps:
                self._evaluate_and_checkpoint()
        saved = self._step == 0 or self._save_now()
        self._reporter.set_activity("ending", step=self._step)
        if self._step < self._config.max_steps or not saved:
            self._finish_uploads(STOP_TIMEOUT_S)
            return False
        return self._finish()

    def _begin(self) -> None:
        self._buffer.prove_with(self._prove, self._after_reconciliation)
        result = self._buffer.reconcile(self._prove())
        self._newest_version = newest = self._buffer.newest_version()
        self._ledger.write_resumed(self._step, result.num_added, result.incarnation, newest_version=newest)
        if self._is_new_lineage or result.num_added < 0:  # of checkpoints that are given up
            self._reporter.record_rewind(self._step)
            self._evaluations.discard_after(self._step)
            self._batch_log.discard_after(self._step)
        self._checkpointer.discard_score_after(self._step)
        self._evaluations.restart()
        self._curriculum.publish()

    def _prove(self) -> Proof:
        step, loaded = self._checkpointer.durable_step, self._loaded
        entry_ids = loaded.entry_ids if loaded and loaded.step == step else ()
        return self._ledger.prove(step, step * self._config.groups_per_step, self._next_number, entry_ids)

    def _after_reconciliation(self, result: Reconciled) -> None:
        """Restore in Redis what only this process knows."""
        self._ledger.write_reconciled(self._step, result)
        self._curriculum.publish()
        self._evaluations.restart()
        if self._published >= 0:  # else the weights are published soon
            self._publish()

    def _train_step(self) -> bool:
        step = self._step
        set_process_log_fields(step=step + 1)
        if not self._apply_settings():
            return False
        if step - self._published > min(self._settings.max_staleness, self._admission_bound):
            self._publish()  # admission has the newest settings, also while earlier steps are repeated
        self._devices.leave()
        began = time.monotonic()
        self._reporter.set_phase("evaluating the start" if step == 0 else "training")
        self._reporter.set_activity("taking", step=step, groups=self._config.groups_per_step)
        newest = max(self._published, self._newest_version)
        taken = self._intake.take(step, self._settings.max_staleness, self._should_stop, newest_version=newest)
        # The first weights must not be replaced while they are being evaluated
        if taken is None or (step == 0 and not self._evaluations.wait(self._should_stop)):
            return False
        self._seconds["wait"] = time.monotonic() - began
        if self._intake.scores is not None:
            self._seconds["score_wait"] = taken.score_wait_s
        if not self._take_devices():
            return False
        replayed = self._replay.select(step, self._settings.max_staleness)
        batch = self._intake.build_batch(step, taken, replayed)
        self._batch_log.record(batch, self._settings.learning_rate)
        with self._timed("train"), self._tracer.train(step, taken.groups):
            gauges = self._trainer.train(batch)
        skips = find_skips(gauges)
        if skips.some:
            self._batch_log.record_skipped(batch, self._settings.learning_rate)
        if (tokens := self._trainer.last_step) is not None:
            self._batch_log.record_tokens(tokens)
        self._step = step + 1
        self._replay.update(taken.trained, replayed)
        self._staleness.sample_slots()
        self._curriculum.observe([*taken.groups, *taken.refilled])
        self._record(taken, replayed, skipped=skips.policy)
        if not (skips.model and is_overflow(gauges)):  # a lower loss scale is tried first
            self._num_skipped = self._num_skipped + 1 if skips.model else 0
        if self._is_publish_due():
            self._publish()
        self._finish_checkpoint()
        if self._uploads is not None:
            self._uploads.report()
        seconds, self._seconds = {**self._seconds, "step": time.monotonic() - began}, {}
        gauges = {**gauges, **replay_values(replayed, step), **self._staleness.observe(gauges, seconds, self._settings)}
        samples = self._sampler.sample(self._step, taken.groups)
        self._reporter.record_step(self._step, step_values(taken, step, gauges, seconds), samples)
        self._raise_on_repeated_skips()
        return True

    def _take_devices(self) -> bool:
        if self._config.takes_turns:
            with self._timed("turn"):
                return self._devices.take(self._should_stop)
        return True

    def _apply_settings(self) -> bool:
        self._staleness.decide(self._step, self._settings)
        while True:
            boundary = self._buffer.adopt(self._step)
            if boundary.ends or self._should_stop():
                return False
            settings = settings_at(self._config.settings, boundary.changes, self._step)
            self._admission_bound = requested_settings(self._config.settings, boundary.changes).max_staleness
            if settings.learning_rate != self._settings.learning_rate:
                self._trainer.set_learning_rate(settings.learning_rate)
            self._settings = settings
            if not boundary.paused:
                return True
            self._devices.leave()
            self._reporter.set_phase("paused")
            self._reporter.set_activity("paused", step=self._step)
            time.sleep(PAUSE_POLL_S)

    def _record(self, taken: StepGroups, replayed: ReplayedGroups, *, skipped: bool) -> None:
        bound = math.inf if self._config.buffer.stale_policy == "train" else self._settings.max_staleness
        self._ledger.write_step(self._step, taken, max_staleness=bound, skipped=skipped, replayed=replayed)
        self._checkpointer.add_consumed(taken.entry_ids)
        self._next_number = max([self._next_number, *(each.number + 1 for each in (*taken.groups, *taken.refilled))])

    def _raise_on_repeated_skips(self) -> None:
        if self._num_skipped >= self._config.actor_train.training_args.max_skipped_steps:
            raise ControlError(
                f"the gradient was not finite in {self._num_skipped} consecutive steps, up to step {self._step}: these "
                "weights can't be trained; see loss, reward and learning rate of these steps in metrics.jsonl"
            )

    def _evaluate_and_checkpoint(self) -> None:
        every = self._config.eval_steps
        if every and self._step % every == 0:
            self._evaluate("during", greedy=False, num_episodes=self._config.val_batch_size)
        if self._checkpointer.is_due(self._step):
            self._checkpoint()
        if self._checkpointer.must_block(self._step):
            self._save_now()

    def _is_publish_due(self) -> bool:
        """Return whether engines need this step's weights; depends on the step alone."""
        config = self._config
        periods = (config.model_update_frequency, config.save_steps, config.eval_steps)
        return self._step >= config.max_steps or any(self._step % each == 0 for each in periods if each)

    def _publish(self) -> None:
        with self._devices.held(), self._timed("publish"), self._tracer.sync(self._step):
            tensors = self._trainer.tensors(with_base=self._publisher.needs_base())
            self._publisher.publish(self._step, self._step, tensors)
            self._published = self._step
        set_process_log_fields(version=self._step)

    def _checkpoint(self) -> None:
        self._finish_checkpoint()
        with self._timed("checkpoint"):
            self._checkpointer.begin(self._state(), self._save)

    def _finish_checkpoint(self) -> None:
        if self._checkpointer.is_pending:
            with self._timed("settle"):
                self._checkpointer.finish()

    def _save_now(self) -> bool:
        with self._timed("checkpoint"):
            return self._checkpointer.save_now(self._state(), self._save, self._should_stop)

    def _state(self) -> LearnerState:
        return LearnerState(
            step=self._step,
            lineage=self._lineage,
            next_number=self._next_number,
            kl_coef=self._trainer.kl_coef,
            num_processes=self._num_processes,
            num_critic_processes=self._num_critic_processes,
            config=self._config.model_dump(mode="json"),
        )

    def _save(self, folder: Path) -> None:
        self._batch_log.flush()
        with self._devices.held():
            self._trainer.save(folder)
        for part in (self._replay, self._staleness, self._curriculum, self._reporter):
            part.save(folder)

    def _evaluate(self, when: When, *, greedy: bool, num_episodes: int) -> None:
        self._evaluate_loss(when)
        if not self._config.plays:
            return
        num_sampled = num_greedy = num_episodes
        if self._num_val_prompts is not None:
            num_greedy = self._num_val_prompts
            num_sampled = num_greedy * self._config.val_env_manager.group_size
        self._evaluations.start(Evaluation(when, "sampled", self._step, num_sampled))
        if greedy:
            self._evaluations.start(Evaluation(when, "greedy", self._step, num_greedy))

    def _evaluate_loss(self, when: When) -> None:
        evaluation = Evaluation(when, "loss", self._step, len(self._validation))
        if len(self._validation) and not self._evaluations.is_recorded(evaluation):
            with self._timed("evaluate"):
                self._evaluations.record_losses(evaluation, self._validation.evaluate(self._trainer))

    def _finish(self) -> bool:
        self._evaluate("after", greedy=True, num_episodes=self._config.final_val_batch_size)
        self._devices.leave()
        self._reporter.set_phase("evaluating the result")
        if not self._evaluations.wait(self._should_stop):
            return False
        self._finish_uploads(FOREGROUND_TIMEOUT_S)
        self._buffer.close(UNNEEDED)
        while self._publisher.flush():  # if Redis lost data meanwhile, closing reconciles it and publishes again
            self._buffer.close(UNNEEDED)
        self._reporter.set_phase(FINISHED)
        return True

    def _upload(self, path: Path) -> None:
        if self._uploads is not None:
            self._uploads.after_checkpoint(path, self._should_stop)

    def _finish_uploads(self, timeout_s: float) -> None:
        if self._uploads is not None and not self._uploads.wait(0.0):
            self._reporter.set_phase("uploading the last checkpoint")
            self._uploads.finish(timeout_s, self._should_stop)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        self._reporter.set_activity(stage, step=self._step)
        try:
            yield
        finally:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + time.monotonic() - began
