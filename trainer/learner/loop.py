"""The learner's loop: take -> train -> publish -> evaluate -> checkpoint -> acknowledge.

Invariants: version v is published after v optimizer batches; groups are acknowledged only when a durable checkpoint
contains them (it becomes durable during the next batch); the state between two steps is consistent, so the loop may
stop there at any time, and a learner that resumes from the newest checkpoint repeats the later steps on the same
groups.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offbeat.services.buffer.api import LearnerBuffer
from offbeat.services.errors import ControlError
from offbeat.services.live_settings import Settings, settings_at
from offbeat.services.weights.api import WeightPublisher
from offbeat.trainer.data.replay_buffer import ReplayBuffer, ReplayedGroups
from offbeat.trainer.data.selection import masked_counts
from offbeat.trainer.learner.checkpointing import Checkpointer
from offbeat.trainer.learner.evaluations import Evaluation, Evaluations, When
from offbeat.trainer.learner.group_intake import GroupIntake, StepGroups
from offbeat.trainer.learner.reporter import (
    LearnerReporter,
    replay_values,
    step_values,
    was_skipped,
)
from offbeat.trainer.learner.staleness_controller import StalenessController
from offbeat.trainer.learner.step_ledger import StepLedger
from offbeat.trainer.learner.task_sampler import Curriculum
from offbeat.trainer.run import FINISHED, LearnerRun
from offbeat.trainer.training.checkpoint import Checkpoint, CheckpointStore, LearnerState
from offbeat.trainer.training.policy_trainer import Trainer

logger = logging.getLogger(__name__)

PAUSE_POLL_S = 0.2
"""Upper bound of the delay with which a resume or stop is noticed while paused."""


@dataclass(frozen=True, slots=True)
class LearnerComponents:
    """Components of the loop."""

    buffer: LearnerBuffer
    publisher: WeightPublisher
    trainer: Trainer
    checkpoints: CheckpointStore
    evaluations: Evaluations
    intake: GroupIntake
    reporter: LearnerReporter
    journal: StepLedger
    replay: ReplayBuffer
    staleness: StalenessController
    curriculum: Curriculum
    stopped: Callable[[], bool]
    """True once the learner should stop."""


class Learner:
    """Trains one run from its newest checkpoint to its last step."""

    def __init__(self, run: LearnerRun, parts: LearnerComponents, *, num_processes: int = 1) -> None:
        self._num_processes = num_processes
        self._lineage = run.lineage
        self._config = run.config
        self._parts = parts
        self._step = 0
        self._saving = Checkpointer(
            parts.checkpoints,
            parts.buffer,
            parts.journal,
            parts.reporter,
            run.config.save_steps,
            tolerant=num_processes == 1,
        )
        self._next_number = 0
        self._seconds: dict[str, float] = {}
        self._settings: Settings = run.config.settings
        self._restored = 0
        self._num_skipped = 0

    @property
    def step(self) -> int:
        """Optimizer batches behind the weights."""
        return self._step

    @property
    def saved_at(self) -> Path | None:
        """Path of the newest checkpoint."""
        return self._saving.newest

    def resume(self, checkpoint: Checkpoint) -> None:
        """Resume from a checkpoint and acknowledge its contents, in case its writer died before it could."""
        state = checkpoint.state
        if self._config.resume_from_checkpoint is True:
            self._lineage = state.lineage  # another one than the run's if that has gone back to an earlier step before
        elif state.lineage != self._lineage:
            self._parts.evaluations.forget_after(state.step)
        self._parts.trainer.load(checkpoint.path, state.kl_coef)
        self._parts.replay.load(checkpoint.path)
        self._parts.staleness.load(checkpoint.path, state.step)
        self._parts.curriculum.load(checkpoint.path)
        self._parts.buffer.ack(state.entry_ids, state.step)
        num_trained = state.step * self._config.groups_per_step
        self._restored = self._parts.buffer.restore(num_trained, state.next_number or None)
        self._step = state.step
        self._next_number = state.next_number
        self._saving.resume_from(checkpoint)
        logger.info("goes on from %s", checkpoint.path)

    def save_start(self) -> None:
        """Keep the weights of the start, so that a replaced learner need not make them again."""
        self._checkpoint()
        self._settle_checkpoint()

    def run(self) -> bool:
        """Train until the last step; return False if stopped before. A checkpoint of the last complete step exists on
        return, unless the learner was stopped and the disk had no space.

        Raises:
            ControlError: too many consecutive steps had a non-finite gradient.
            UnsavedError: no checkpoint could be written within the time limit.
        """
        self._parts.journal.resumed(self._step, self._restored)
        self._parts.curriculum.tell()
        self._publish()
        if self._step == 0:
            self._evaluate("before", greedy=True, num_episodes=self._config.final_val_batch_size)
        while self._step < self._config.max_steps and self._train_step():
            self._parts.evaluations.collect()
            if self._step < self._config.max_steps:
                self._between_steps()
        saved = self._step == 0 or self._save_now()
        if self._step < self._config.max_steps or not saved:
            return False
        return self._finish()

    def _train_step(self) -> bool:
        """One optimizer batch; False if the learner was stopped before it began."""
        parts, step = self._parts, self._step
        if not self._boundary():
            return False
        began = time.monotonic()
        parts.reporter.phase("evaluating the start" if step == 0 else "training")
        parts.reporter.doing("taking", step=step, groups=self._config.groups_per_step)
        taken = replace(parts.intake, max_staleness=self._settings.max_staleness).take(step, parts.stopped)
        # The first weights must not be replaced while they are being evaluated
        if taken is None or (step == 0 and not parts.evaluations.wait(parts.stopped)):
            return False
        self._seconds["wait"] = time.monotonic() - began
        again = parts.replay.choose(step, self._settings.max_staleness)
        groups, weights = [*taken.signal, *again.groups], [*(1.0 for _ in taken.signal), *again.weights]
        with self._timed("train"):
            gauges = parts.trainer.train(groups, step, masked_counts(taken.masked, self._config), weights)
        self._step = step + 1
        parts.replay.trained(taken.signal, again)
        parts.staleness.trained()
        parts.curriculum.seen([*taken.groups, *taken.unlearned])
        self._remember(taken, again, skipped=was_skipped(gauges))
        self._publish()
        self._settle_checkpoint()
        seconds, self._seconds = {**self._seconds, "step": time.monotonic() - began}, {}
        gauges = {**gauges, **replay_values(again, step), **parts.staleness.observe(gauges, seconds, self._settings)}
        parts.reporter.step(self._step, step_values(taken, step, gauges, seconds))
        self._check_skips()
        return True

    def _boundary(self) -> bool:
        """Apply pending settings, and wait while the run is paused; return False if the run should stop."""
        self._parts.staleness.decide(self._step, self._settings)
        while True:
            boundary = self._parts.buffer.adopt(self._step)
            if boundary.ends or self._parts.stopped():
                return False
            settings = settings_at(self._config.settings, boundary.changes, self._step)
            if settings.learning_rate != self._settings.learning_rate:
                self._parts.trainer.set_learning_rate(settings.learning_rate)
            self._settings = settings
            if not boundary.paused:
                return True
            self._parts.reporter.phase("paused")
            self._parts.reporter.doing("paused", step=self._step)
            time.sleep(PAUSE_POLL_S)

    def _remember(self, taken: StepGroups, again: ReplayedGroups, *, skipped: bool) -> None:
        bound = self._settings.max_staleness
        self._parts.journal.trained(self._step, taken, max_staleness=bound, skipped=skipped, again=again)
        self._num_skipped = self._num_skipped + 1 if skipped else 0
        self._saving.consumed(taken.entry_ids)
        self._next_number = max([self._next_number, *(group.number + 1 for group in taken.groups)])

    def _check_skips(self) -> None:
        most = self._config.actor_train.training_args.max_skipped_steps
        if self._num_skipped >= most:
            raise ControlError(
                f"the gradient of {self._num_skipped} steps in a row was not finite, up to step {self._step}: these weights "
                "can't be trained on. Look at loss, reward and learning rate of these steps in metrics.jsonl"
            )

    def _between_steps(self) -> None:
        every = self._config.eval_steps
        if every and self._step % every == 0:
            self._evaluate("during", greedy=False, num_episodes=self._config.val_batch_size)
        if self._saving.is_due(self._step):
            self._checkpoint()
        if self._saving.must_block(self._step):
            self._save_now()

    def _publish(self) -> None:
        with self._timed("publish"):
            self._parts.publisher.publish(self._step, self._step, self._parts.trainer.tensors())

    def _checkpoint(self) -> None:
        self._settle_checkpoint()
        with self._timed("checkpoint"):
            self._saving.begin(self._state(), self._save)

    def _settle_checkpoint(self) -> None:
        """See the checkpoint through that is under way; what it contains leaves the buffer."""
        if self._saving.is_under_way:
            with self._timed("settle"):
                self._saving.settle()

    def _save_now(self) -> bool:
        """See a checkpoint of this step through; False if the learner was stopped while there was no room for one."""
        with self._timed("checkpoint"):
            return self._saving.save_now(self._state(), self._save, self._parts.stopped)

    def _state(self) -> LearnerState:
        return LearnerState(
            step=self._step,
            lineage=self._lineage,
            next_number=self._next_number,
            kl_coef=self._parts.trainer.kl_coef,
            num_processes=self._num_processes,
            config=self._dumped_config(),
        )

    def _save(self, folder: Path) -> None:
        self._parts.trainer.save(folder)
        self._parts.replay.save(folder)
        self._parts.staleness.save(folder)
        self._parts.curriculum.save(folder)

    def _dumped_config(self) -> dict[str, Any]:
        return self._config.model_dump(mode="json")

    def _evaluate(self, when: When, *, greedy: bool, num_episodes: int) -> None:
        self._parts.evaluations.start(Evaluation(when, "sampled", self._step, num_episodes))
        if greedy:
            self._parts.evaluations.start(Evaluation(when, "greedy", self._step, num_episodes))

    def _finish(self) -> bool:
        self._evaluate("after", greedy=True, num_episodes=self._config.final_val_batch_size)
        self._parts.reporter.phase("evaluating the result")
        if not self._parts.evaluations.wait(self._parts.stopped):
            return False
        self._parts.reporter.phase(FINISHED)
        return True

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        self._parts.reporter.doing(stage, step=self._step)
        try:
            yield
        finally:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + time.monotonic() - began
