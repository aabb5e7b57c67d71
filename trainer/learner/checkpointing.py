"""Background checkpoints.

Invariant: a group leaves the buffer only when a durable checkpoint contains it; groups of a failed one join the next.
"""

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from offbeat.services.buffer.api import LearnerBuffer
from offbeat.trainer.learner.reporter import LearnerReporter
from offbeat.trainer.learner.step_ledger import StepLedger
from offbeat.trainer.training.checkpoint import Checkpoint, LearnerState
from offbeat.trainer.training.checkpoint_store import CheckpointStore, UnsavedError

logger = logging.getLogger(__name__)

RETRY_INTERVAL_S = 5.0
MAX_UNSAVED_INTERVALS = 5
"""In `save_steps`; unsaved groups occupy the buffer's memory."""
DISK_SPACE_TIMEOUT_S = 900.0
"""Maximum wait before the learner exits."""


class Checkpointer:
    def __init__(
        self,
        store: CheckpointStore,
        buffer: LearnerBuffer,
        ledger: StepLedger,
        reporter: LearnerReporter,
        save_steps: int,
        *,
        tolerant: bool,
        on_durable: Callable[[Path], None] = lambda _: None,
    ) -> None:
        """tolerant: continue after a failed write; single rank only. on_durable: receives a checkpoint's folder."""
        self._store = store
        self._buffer = buffer
        self._ledger = ledger
        self._reporter = reporter
        self._save_steps = save_steps
        self._tolerant = tolerant
        self._on_durable = on_durable
        self.newest: Path | None = None
        """Newest durable checkpoint."""
        self.step: int | None = None
        """Newest checkpoint, durable or in progress."""
        self._durable_step = 0
        self._consumed: list[str] = []
        """Entries consumed since the last `begin`."""
        self._contained: tuple[str, ...] = ()
        """Of the checkpoint in progress."""
        self._pending: Future[Path] | None = None
        self._retry_at: float | None = None
        """Monotonic time of the next try."""

    @property
    def durable_step(self) -> int:
        """Return the newest durable step; 0 without any."""
        return self._durable_step

    @property
    def is_pending(self) -> bool:
        return self._pending is not None

    def resume_from(self, checkpoint: Checkpoint) -> None:
        self.newest, self.step = checkpoint.path, checkpoint.state.step
        self._durable_step = checkpoint.state.step

    def discard_score_after(self, step: int) -> None:
        self._store.discard_score_after(step)

    def add_consumed(self, entry_ids: Iterable[str]) -> None:
        self._consumed += entry_ids

    def is_due(self, step: int) -> bool:
        if self._retry_at is not None:
            return time.monotonic() >= self._retry_at
        return step % self._save_steps == 0

    def begin(self, state: LearnerState, write: Callable[[Path], None]) -> None:
        """Start a checkpoint; the previous one must be finished.

        Raises:
            UnsavedError: the write failed, with other ranks.
        """
        self._contained, self._consumed = tuple(self._consumed), []
        previous_step, self.step = self.step, state.step
        try:
            self._sync_ledger()
            self._pending = self._store.save(replace(state, entry_ids=self._contained), write)
        except UnsavedError as error:
            self.step = previous_step
            self._record_failure(error, state.step)
            if not self._tolerant:
                raise

    def finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            self.newest = pending.result()
        except UnsavedError as error:
            step, self.step = self.step or 0, self._durable_step or None
            self._record_failure(error, step)
            return
        self._durable_step = self.step or 0
        contained, self._contained = self._contained, ()
        if contained:
            self._buffer.ack(contained, self._durable_step)
        self._retry_at = None
        self._reporter.set_problem("")
        self._on_durable(self.newest)

    def save_now(self, state: LearnerState, write: Callable[[Path], None], should_stop: Callable[[], bool]) -> bool:
        """Write a checkpoint, waiting for disk space; return False if stopped.

        Raises:
            UnsavedError: no space for `DISK_SPACE_TIMEOUT_S`.
        """
        deadline = time.monotonic() + DISK_SPACE_TIMEOUT_S
        while True:
            self.finish()
            if self.step != state.step:
                self.begin(state, write)
                self.finish()
            if self.step == state.step:
                return True
            if should_stop():
                return False
            if time.monotonic() > deadline:
                raise UnsavedError(f"step {state.step} could not be saved for {DISK_SPACE_TIMEOUT_S:.0f} s")
            self._reporter.set_activity("no_room", step=state.step)
            time.sleep(RETRY_INTERVAL_S)

    def must_block(self, step: int) -> bool:
        return self._retry_at is not None and step - self._durable_step >= MAX_UNSAVED_INTERVALS * self._save_steps

    def _sync_ledger(self) -> None:
        try:
            self._ledger.sync()
        except OSError as error:
            raise UnsavedError(f"the step ledger can't be written: {error}") from error

    def _record_failure(self, error: UnsavedError, step: int) -> None:
        self._consumed = [*self._contained, *self._consumed]
        self._contained = ()
        self._retry_at = time.monotonic() + RETRY_INTERVAL_S
        newest = f"the newest complete one is of step {self._durable_step}" if self.newest else "there is none yet"
        self._reporter.set_problem(f"the checkpoint of step {step} could not be written ({error}); {newest}")
