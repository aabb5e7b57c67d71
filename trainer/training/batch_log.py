"""Recorded batches on disk: the arguments of `Trainer.train`, for `offbeat learner reproduce`.

Invariants: batches are written atomically, in the background; every batch that a checkpoint contains was written before
it. Batches with a non-finite gradient are always kept.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgpack
from torch import Tensor

from offbeat.services.errors import CodecError
from offbeat.services.messages.types import Group
from offbeat.trainer.algorithms.aggregation import NO_MASKED, MaskedCounts
from offbeat.trainer.data.group_codec import pack_group, unpack_group
from offbeat.trainer.learner.reporter import was_skipped
from offbeat.trainer.training.optimizer_step import Gauges
from offbeat.trainer.training.policy_trainer import Trainer
from offbeat.trainer.warm_start.train import Progress

FOLDER = "batches"
PREFIX, SKIPPED, SUFFIX = "step-", "skipped-", ".msgpack"
SKIPPED_KEPT = 16
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """Arguments of one `Trainer.train` call."""

    step: int
    """Version that the batch produced; `train` is called with `step - 1`."""
    learning_rate: float
    """Peak of the schedule at that step."""
    groups: tuple[Group, ...]
    silent: MaskedCounts = NO_MASKED
    weights: tuple[float, ...] = ()


class BatchLog:
    """The recorded batches of a run's folder."""

    def __init__(self, output_dir: Path, keep: int = 0) -> None:
        """keep: newest batches that `write` leaves there."""
        self._folder = output_dir / FOLDER
        self._keep = keep

    def write(self, batch: RecordedBatch, *, skipped: bool = False) -> None:
        """Keep a batch, and remove the oldest beyond `keep`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        prefix, kept = (SKIPPED, SKIPPED_KEPT) if skipped else (PREFIX, self._keep)
        target = self._folder / f"{prefix}{batch.step:06d}{SUFFIX}"
        aside = target.with_name(f".{target.name}")
        groups = [pack_group(group) for group in batch.groups]
        body = [SCHEMA, batch.step, batch.learning_rate, list(batch.silent), list(batch.weights), groups]
        with aside.open("wb") as file:
            file.write(cast(bytes, msgpack.packb(body)))
            file.flush()
            os.fsync(file.fileno())
        aside.rename(target)
        for old in sorted(self._folder.glob(f"{prefix}*{SUFFIX}"))[:-kept]:
            old.unlink(missing_ok=True)

    def steps(self) -> list[int]:
        """Return the recorded steps in order."""
        names = (
            path.name.removeprefix(PREFIX).removesuffix(SUFFIX) for path in self._folder.glob(f"{PREFIX}*{SUFFIX}")
        )
        return sorted(int(name) for name in names if name.isdigit())

    def read(self, step: int) -> RecordedBatch:
        """A recorded batch.

        Raises:
            CodecError: it can't be read; the message names the file.
        """
        path = self._folder / f"{PREFIX}{step:06d}{SUFFIX}"
        try:
            schema, found, learning_rate, silent, weights, groups = msgpack.unpackb(path.read_bytes())
            if (schema, found) != (SCHEMA, step):
                raise CodecError(f"schema {schema}, step {found}")
            members = tuple(unpack_group(group) for group in groups)
            return RecordedBatch(step, float(learning_rate), members, MaskedCounts(*silent), tuple(weights))
        except (OSError, ValueError, TypeError, msgpack.UnpackException, CodecError) as error:
            raise CodecError(f"{path} is no recorded batch: {error}") from error


class RecordingTrainer:
    """A trainer whose batches are recorded."""

    def __init__(self, trainer: Trainer, store: BatchLog, learning_rate: float, *, every: bool) -> None:
        """learning_rate: peak of the schedule until `steer`. every: else only those without a finite gradient."""
        self._trainer = trainer
        self._store = store
        self._learning_rate = learning_rate
        self._every = every
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._writing: list[Future[None]] = []

    @property
    def kl_coef(self) -> float:
        return self._trainer.kl_coef

    def begin(self, progress: Progress, stopped: Callable[[], bool]) -> bool:
        return self._trainer.begin(progress, stopped)

    def load(self, folder: Path, kl_coef: float) -> None:
        self._trainer.load(folder, kl_coef)

    def set_learning_rate(self, learning_rate: float) -> None:
        self._learning_rate = learning_rate
        self._trainer.set_learning_rate(learning_rate)

    def train(
        self, groups: Sequence[Group], step: int, silent: MaskedCounts = NO_MASKED, weights: Sequence[float] = ()
    ) -> Gauges:
        batch = RecordedBatch(step + 1, self._learning_rate, tuple(groups), silent, tuple(weights))
        if self._every:
            self._keep(batch, skipped=False)
        gauges = self._trainer.train(groups, step, silent, weights)
        if was_skipped(gauges):
            self._keep(batch, skipped=True)
        return gauges

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self._trainer.tensors()

    def save(self, folder: Path) -> None:
        """See `Trainer.save`. Raises OSError if a batch could not be written."""
        self.settle()
        self._trainer.save(folder)

    def settle(self) -> None:
        """Wait until every batch is written. Raises OSError if one could not be."""
        writing, self._writing = self._writing, []
        for each in writing:
            each.result()

    def _keep(self, batch: RecordedBatch, *, skipped: bool) -> None:
        self._writing.append(self._thread.submit(self._store.write, batch, skipped=skipped))
