"""Checkpoints during training: written between two steps, made durable in the background, then acknowledged.

Invariants: a group leaves the buffer only when a durable checkpoint contains it; if a checkpoint can't be written (full
disk), the previous one and its groups in the buffer stay, and the next successful one contains them.
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
from offbeat.trainer.training.checkpoint import (
    Checkpoint,
    CheckpointStore,
    LearnerState,
    UnsavedError,
)

logger = logging.getLogger(__name__)

RETRY_S = 5.0
"""Between two tries to write a checkpoint that could not be written."""
UNSAVED_INTERVALS = 5
"""Multiples of `save_steps` for which training continues without checkpoints; unsaved groups stay in the buffer's memory."""
PATIENCE_S = 900.0
"""How long a learner that may not train waits for disk space before it exits and is restarted."""


class Checkpointer:
    """The checkpoints of one learner."""

    def __init__(
        self,
        store: CheckpointStore,
        buffer: LearnerBuffer,
        journal: StepLedger,
        reporter: LearnerReporter,
        save_steps: int,
        *,
        tolerant: bool,
    ) -> None:
        """tolerant: a failed write is not fatal (only if no other rank waits inside of it)."""
        self._store = store
        self._buffer = buffer
        self._journal = journal
        self._reporter = reporter
        self._save_steps = save_steps
        self._tolerant = tolerant
        self.newest: Path | None = None
        """The newest durable one."""
        self.step: int | None = None
        """Step of the newest durable checkpoint, or of the one in progress."""
        self._durable_step = 0
        self._consumed: list[str] = []
        """Since the newest checkpoint was begun."""
        self._contained: tuple[str, ...] = ()
        """Entries acknowledged once the checkpoint in progress is durable."""
        self._under_way: Future[Path] | None = None
        self._retry_at: float | None = None
        """Monotonic time of the next try, after one that failed."""

    @property
    def is_under_way(self) -> bool:
        """True if a checkpoint is in progress."""
        return self._under_way is not None

    def resume_from(self, checkpoint: Checkpoint) -> None:
        """Mark the contents of `checkpoint` as saved."""
        self.newest, self.step = checkpoint.path, checkpoint.state.step
        self._durable_step = checkpoint.state.step

    def consumed(self, entry_ids: Iterable[str]) -> None:
        """The next checkpoint contains these."""
        self._consumed += entry_ids

    def is_due(self, step: int) -> bool:
        """Return True if a checkpoint of `step` is due."""
        if self._retry_at is not None:
            return time.monotonic() >= self._retry_at
        return step % self._save_steps == 0

    def begin(self, state: LearnerState, write: Callable[[Path], None]) -> None:
        """Write a checkpoint; `settle` sees it through. The one before must be settled.

        Raises:
            UnsavedError: it could not be written, and other ranks wait for this one.
        """
        self._contained, self._consumed = tuple(self._consumed), []
        before, self.step = self.step, state.step
        try:
            self._sync_journal()
            self._under_way = self._store.save(replace(state, entry_ids=self._contained), write)
        except UnsavedError as error:
            self.step = before
            self._failed(error, state.step)
            if not self._tolerant:
                raise

    def settle(self) -> None:
        """See the checkpoint through that is under way; what it contains leaves the buffer."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        try:
            self.newest = under_way.result()
        except UnsavedError as error:
            step, self.step = self.step or 0, self._durable_step or None
            self._failed(error, step)
            return
        self._durable_step = self.step or 0
        contained, self._contained = self._contained, ()
        if contained:
            self._buffer.ack(contained, self._durable_step)
        self._retry_at = None
        self._reporter.trouble("")

    def save_now(self, state: LearnerState, write: Callable[[Path], None], given_up: Callable[[], bool]) -> bool:
        """Write a checkpoint of `state`, waiting for disk space; return False if `given_up` becomes true first.

        Raises:
            UnsavedError: no space was free for `PATIENCE_S`.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.settle()
            if self.step != state.step:
                self.begin(state, write)
                self.settle()
            if self.step == state.step:
                return True
            if given_up():
                return False
            if time.monotonic() > deadline:
                raise UnsavedError(f"step {state.step} could not be saved for {PATIENCE_S:.0f} s")
            self._reporter.doing("no_room", step=state.step)
            time.sleep(RETRY_S)

    def must_block(self, step: int) -> bool:
        """Return True if too many steps are unsaved to continue training."""
        return self._retry_at is not None and step - self._durable_step >= UNSAVED_INTERVALS * self._save_steps

    def _sync_journal(self) -> None:
        try:
            self._journal.sync()
        except OSError as error:
            raise UnsavedError(f"the ledger can't be written: {error}") from error

    def _failed(self, error: UnsavedError, step: int) -> None:
        self._consumed = [*self._contained, *self._consumed]
        self._contained = ()
        self._retry_at = time.monotonic() + RETRY_S
        kept = f"the newest whole one is of step {self._durable_step}" if self.newest else "there is none yet"
        self._reporter.trouble(f"the checkpoint of step {step} could not be written ({error}); {kept}")
