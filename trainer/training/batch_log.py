"""Batches for `offbeat learner reproduce`, and their tokens' outcomes for the console.

Invariants: writes are atomic, in the background, before the checkpoint, and only by the newest learner that has written
any.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import msgpack

from offbeat.services.errors import CodecError, FencedError
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.training.fenced_folder import FencedFolder
from offbeat.trainer.training.recorded_steps import PREFIX, SCHEMA, SUFFIX, TOKENS, RecordedSteps
from offbeat.trainer.training.step_tokens import StepTokens

logger = logging.getLogger(__name__)

SKIPPED = "skipped-"
UNSHAPED = 4
"""Fields of a packed batch without its shaped rewards, which a reproduction computes anew."""
MAX_SKIPPED = 16


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    batch: StepBatch
    learning_rate: float


class BatchLog(RecordedSteps):
    def __init__(self, output_dir: Path, max_kept: int = 0, epoch: int = 0, num_shown: int = 0) -> None:
        """max_kept: newest batches, besides those with a non-finite gradient. epoch: the writer's lease. num_shown:
        newest steps for the console.
        """
        super().__init__(output_dir)
        self._epoch = epoch
        self._files: FencedFolder | None = None
        self._max_kept = max(max_kept, num_shown)
        self._num_shown = num_shown
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-log")
        self._pending: list[tuple[Callable[[], None], Future[None]]] = []

    def record(self, batch: StepBatch, learning_rate: float) -> None:
        """Write in the background."""
        if self._max_kept:
            self._submit(partial(self._write_batch, RecordedBatch(batch, learning_rate), PREFIX, self._max_kept))

    def record_skipped(self, batch: StepBatch, learning_rate: float) -> None:
        """Write a batch with a non-finite gradient."""
        self._submit(partial(self._write_batch, RecordedBatch(batch, learning_rate), SKIPPED, MAX_SKIPPED))

    def record_tokens(self, tokens: StepTokens) -> None:
        """Write a step's token outcomes in the background."""
        if self._num_shown:
            self._submit(partial(self._write_tokens, tokens))

    def discard_after(self, step: int) -> None:
        """Remove batches and token outcomes of later steps, whose weights are given up; raises `FencedError`."""
        for prefix in (PREFIX, TOKENS):
            for later in [each for each in self.steps(prefix) if each > step]:
                self._files = self._files or FencedFolder(self._folder, self._epoch)
                self._files.remove(f"{prefix}{later:06d}{SUFFIX}")

    def flush(self) -> None:
        """Wait for pending writes.

        Raises:
            OSError: a write failed; the next call waits for its repetition.
            FencedError: a newer learner writes batches.
        """
        pending, self._pending = self._pending, []
        errors: list[BaseException] = []
        for write, written in pending:
            if error := written.exception():
                if isinstance(error, FencedError):
                    raise error
                errors.append(error)
                self._submit(write)
        if errors:
            raise errors[0]

    def read(self, version: int, config: AlgorithmConfig) -> RecordedBatch:
        """Read a version's batch.

        Raises:
            CodecError: unreadable file.
        """
        learning_rate, *body = self.unpack(version)
        try:
            batch = StepBatch.unpack([version - 1, *body[:UNSHAPED]], config)
            return RecordedBatch(batch, float(learning_rate))
        except (ValueError, TypeError, CodecError) as error:
            raise CodecError(f"{self.path(version)} is no recorded batch: {error}") from error

    def _submit(self, write: Callable[[], None]) -> None:
        self._pending = [entry for entry in self._pending if not _is_written(entry[1])]  # releases their batches
        self._pending.append((write, self._thread.submit(write)))

    def _write_batch(self, recorded: RecordedBatch, prefix: str, max_kept: int) -> None:
        step, *body = recorded.batch.pack()
        version = cast(int, step) + 1
        content = cast(bytes, msgpack.packb([SCHEMA, version, recorded.learning_rate, *body]))
        self._write(prefix, version, content, max_kept)

    def _write_tokens(self, tokens: StepTokens) -> None:
        try:
            content = tokens.encode()
        except Exception:  # of a user's loss or correction: what is only shown must not end the training
            logger.exception("the tokens of step %d can't be explained, and are not shown", tokens.version)
            return
        self._write(TOKENS, tokens.version, content, self._num_shown)

    def _write(self, prefix: str, version: int, content: bytes, max_kept: int) -> None:
        self._files = self._files or FencedFolder(self._folder, self._epoch)
        self._files.write(f"{prefix}{version:06d}{SUFFIX}", content)
        # Later ones are of steps that are being trained again
        earlier = [step for step in self.steps(prefix) if step < version]
        for old in earlier[: max(0, len(earlier) - (max_kept - 1))]:
            self._files.remove(f"{prefix}{old:06d}{SUFFIX}")


def _is_written(write: Future[None]) -> bool:
    return write.done() and write.exception() is None
