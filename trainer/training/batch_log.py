"""Batches for `offbeat learner reproduce`.

Invariants: writes are atomic, in the background, before the checkpoint, and only by the newest learner that has written
any.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgpack

from offbeat.services.errors import CodecError, FencedError
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.training.fenced_folder import FencedFolder

FOLDER = "batches"
PREFIX, SKIPPED, SUFFIX = "step-", "skipped-", ".msgpack"
MAX_SKIPPED = 16
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """Batch and its peak learning rate."""

    batch: StepBatch
    learning_rate: float


class BatchLog:
    def __init__(self, output_dir: Path, max_kept: int = 0, epoch: int = 0) -> None:
        """max_kept: newest batches kept, besides those with a non-finite gradient. epoch: the writer's lease."""
        self._folder = output_dir / FOLDER
        self._epoch = epoch
        self._files: FencedFolder | None = None
        self._max_kept = max_kept
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-log")
        self._pending: list[tuple[tuple[RecordedBatch, str, int], Future[None]]] = []

    def record(self, batch: StepBatch, learning_rate: float) -> None:
        """Write in the background."""
        if self._max_kept:
            self._submit(RecordedBatch(batch, learning_rate), PREFIX, self._max_kept)

    def record_skipped(self, batch: StepBatch, learning_rate: float) -> None:
        """Write a batch with a non-finite gradient."""
        self._submit(RecordedBatch(batch, learning_rate), SKIPPED, MAX_SKIPPED)

    def flush(self) -> None:
        """Wait for pending writes.

        Raises:
            OSError: a write failed; the next call waits for its repetition.
            FencedError: a newer learner writes batches.
        """
        pending, self._pending = self._pending, []
        errors: list[BaseException] = []
        for arguments, write in pending:
            if error := write.exception():
                if isinstance(error, FencedError):
                    raise error
                errors.append(error)
                self._submit(*arguments)
        if errors:
            raise errors[0]

    def steps(self) -> list[int]:
        names = (
            path.name.removeprefix(PREFIX).removesuffix(SUFFIX) for path in self._folder.glob(f"{PREFIX}*{SUFFIX}")
        )
        return sorted(int(name) for name in names if name.isdigit())

    def read(self, version: int, config: AlgorithmConfig) -> RecordedBatch:
        """Read a version's batch.

        Raises:
            CodecError: unreadable file.
        """
        path = self._folder / f"{PREFIX}{version:06d}{SUFFIX}"
        try:
            schema, recorded, learning_rate, *body = msgpack.unpackb(path.read_bytes())
            if (schema, recorded) != (SCHEMA, version):
                raise CodecError(f"schema {schema}, step {recorded}")
            return RecordedBatch(StepBatch.unpack([version - 1, *body], config), float(learning_rate))
        except (OSError, ValueError, TypeError, msgpack.UnpackException, CodecError) as error:
            raise CodecError(f"{path} is no recorded batch: {error}") from error

    def _submit(self, recorded: RecordedBatch, prefix: str, max_kept: int) -> None:
        arguments = (recorded, prefix, max_kept)
        self._pending = [entry for entry in self._pending if not _is_written(entry[1])]  # releases their batches
        self._pending.append((arguments, self._thread.submit(self._write, *arguments)))

    def _write(self, recorded: RecordedBatch, prefix: str, max_kept: int) -> None:
        self._files = self._files or FencedFolder(self._folder, self._epoch)
        step, *body = recorded.batch.pack()
        version = cast(int, step) + 1
        name = f"{prefix}{version:06d}{SUFFIX}"
        self._files.write(name, cast(bytes, msgpack.packb([SCHEMA, version, recorded.learning_rate, *body])))
        # Later ones are of steps that are being trained again
        earlier = [path.name for path in sorted(self._folder.glob(f"{prefix}*{SUFFIX}")) if path.name < name]
        for old in earlier[: max(0, len(earlier) - (max_kept - 1))]:
            self._files.remove(old)


def _is_written(write: Future[None]) -> bool:
    return write.done() and write.exception() is None
