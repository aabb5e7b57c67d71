"""The writer of a run's checkpoints.

Invariant: only the holder of the newest lease changes anything.
"""

import itertools
import json
import logging
import math
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

from safetensors import SafetensorError

from offbeat.services.durable_files import FULL_DISK, sync_tree, write_json
from offbeat.services.errors import FencedError
from offbeat.trainer.training.checkpoint import (
    BEST,
    LEARNER,
    MANIFEST,
    PREFIX,
    SCORE,
    UPLOADED,
    Checkpoint,
    CheckpointError,
    LearnerState,
    ListedCheckpoint,
    RemoteCheckpoint,
    describe,
    fingerprint,
    is_checkpoint,
    newest_complete,
    read_checkpoint,
    read_epoch,
    read_manifest,
    writing_order,
)
from offbeat.trainer.training.fenced_folder import EPOCH, REMOVED, FencedFolder, delete, entries

logger = logging.getLogger(__name__)

TEMPORARY = ".writing-"
SCHEMA = 1


class UnsavedError(RuntimeError):
    """Failed checkpoint, already removed."""


class CheckpointStore:
    """Writer of checkpoints in one lease epoch."""

    def __init__(self, folder: Path, keep: int, epoch: int) -> None:
        """Take over the folder.

        Raises:
            FencedError: a learner of this or a later epoch has it.
        """
        if (newest := read_epoch(folder)) > epoch:
            raise FencedError(f"{folder} was written by a learner of epoch {newest}; this learner's epoch is {epoch}")
        self._keep = keep
        self._folder = folder
        self._files = FencedFolder(folder, epoch)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._sequence = itertools.count()
        self._unfinished: Path | None = None
        """Checkpoint that is being written: not removed with those that broke off."""
        self._listed = self._adopt()
        self._last_serial = max((each.serial for each in self._listed), default=0)
        self._elsewhere: frozenset[str] = frozenset()
        self._scores: dict[str, float] = {}
        """Scores of checkpoints that are not durable yet, or that a full disk refused."""
        self._scoring = threading.Lock()
        self.pinned: Callable[[], Collection[str]] = tuple
        """Names of copies in progress."""
        self._remove_unfinished()
        try:
            self._write_manifest(self._listed)
        except OSError as error:  # a full disk; written with the next checkpoint
            logger.warning("%s can't be written: %s", folder / MANIFEST, error)

    def _adopt(self) -> list[ListedCheckpoint]:
        """Return the checkpoints, oldest first, including complete but unlisted ones."""
        for path in self._files.taken_over():
            earlier = self._folder / path.name
            if not is_checkpoint(path) or (earlier.exists() and describe(earlier).serial > describe(path).serial):
                continue
            with suppress(CheckpointError):
                read_checkpoint(path)
                self._replace(path, path.name)
        named = {each.name: each for each in read_manifest(self._folder)}
        paths = [path for path in entries(self._folder) if is_checkpoint(path)]
        return sorted((describe(path, named.get(path.name)) for path in paths), key=writing_order)

    def save(self, state: LearnerState, write: Callable[[Path], None]) -> "Future[Path]":
        """Write a checkpoint; the future is done once it is durable and old ones are removed.

        `write` fills a folder in the foreground. The previous future must be done; errors are raised here or in the
        future.

        Raises:
            UnsavedError: the write failed.
            FencedError: another learner has the folder.
        """
        name = f"{PREFIX}{state.step:06d}"
        # Not inside the epoch's folder: a library that makes missing parents would bring that back
        temporary = self._folder / f"{TEMPORARY}{self._files.epoch:06d}-{next(self._sequence)}-{name}"
        self._last_serial = serial = 1 + self._last_serial
        state = replace(state, serial=serial, epoch=self._files.epoch)
        self._files.check()
        self._unfinished = temporary
        with self._unsaved_if_failing(temporary):
            temporary.mkdir()
            write(temporary)
            write_json(temporary / LEARNER, asdict(state))
        listed = ListedCheckpoint(name, state.step, state.lineage, serial, state.epoch)
        return self._thread.submit(self._make_durable, temporary, listed)

    def _make_durable(self, temporary: Path, new: ListedCheckpoint) -> Path:
        with self._unsaved_if_failing(temporary):
            digests = {str(p.relative_to(temporary)): fingerprint(p) for p in _files(temporary)}
            write_json(temporary / MANIFEST, digests)
            sync_tree(temporary)
            self._publish(temporary, new.name)
            self._unfinished = None
            others = [each for each in self._listed if each.name != new.name]
            self._listed = [*others, new]
            self._apply_scores()
            retained = self._retained(others, new)
            self._write_manifest(retained)
        removed, self._listed = [each for each in others if each not in retained], retained
        for each in removed:
            try:
                self._files.remove(each.name)
            except OSError as error:  # it is no longer in the manifest
                logger.warning("checkpoint %s can't be removed: %s", self._folder / each.name, error)
        self._remove_unfinished()
        return self._folder / new.name

    def _publish(self, temporary: Path, name: str) -> None:
        """Rename a complete checkpoint, replacing one of another lineage or a damaged one."""
        # A successor publishes what it finds staged, so that the earlier one may go first
        self._files.stage(temporary, name)
        self._replace(name, name)

    def _replace(self, staged: str | Path, name: str) -> None:
        earlier = self._files.take_away(name) if (self._folder / name).exists() else None
        self._files.publish(staged, name)
        if earlier is not None:
            delete(earlier)

    def _retained(self, others: list[ListedCheckpoint], new: ListedCheckpoint) -> list[ListedCheckpoint]:
        """Return the newest written, the best, and `new`, oldest first."""
        best = self._best()
        candidates = [each for each in others if best is None or each.name != best[0]]
        newest = candidates[1 - self._keep :] if self._keep > 1 else []
        pinned = self.pinned()
        kept = [each for each in others if each in newest or each not in candidates or each.name in pinned]
        return [*kept, new]

    def _write_manifest(self, listed: list[ListedCheckpoint]) -> None:
        tree = {"schema": SCHEMA, "epoch": self._files.epoch, "checkpoints": [asdict(each) for each in listed]}
        self._files.write_json(MANIFEST, tree)

    def score(self, step: int, value: float) -> None:
        """Record a step's score and update `best`, once its checkpoint is durable; raises `FencedError`."""
        with self._scoring:
            self._scores[f"{PREFIX}{step:06d}"] = value
        self._apply_scores()

    def discard_score_after(self, step: int) -> None:
        """Forget the best checkpoint if it is of a later step, whose weights are given up; raises `FencedError`."""
        best = self._read_score()
        if best is None or best[0] <= step:
            return
        for name in (BEST, SCORE):
            with suppress(FileNotFoundError):
                delete(self._files.take_away(name))

    def _apply_scores(self) -> None:
        with self._scoring:
            for name in [name for name in self._scores if self._has(name)]:
                try:
                    self._set_score(name, self._scores[name])
                except OSError as error:
                    if error.errno not in FULL_DISK:
                        raise
                    logger.warning("the score of %s is written with the next checkpoint: %s", name, error)
                    return
                del self._scores[name]

    def _set_score(self, name: str, value: float) -> None:
        path = self._folder / name
        best = self._best()
        # After a resume, the same step may have different weights and another score
        is_best = best is None or best[0] == path.name or best[1] <= value
        if not math.isfinite(value) or not is_best:
            return
        self._files.write_json(SCORE, {"step": int(name.removeprefix(PREFIX)), "score": value})
        if path.is_dir():
            self._files.link(BEST, path.name)
        else:  # in the store alone: the link is to the earlier best, which may go now
            with suppress(FileNotFoundError):
                delete(self._files.take_away(BEST))

    def _has(self, name: str) -> bool:
        return (self._folder / name).is_dir() or name in self._elsewhere

    def _best(self) -> tuple[str, float] | None:
        if (best := self._read_score()) is None:
            return None
        step, score = best
        return (name, score) if self._has(name := f"{PREFIX}{step:06d}") else None

    def _read_score(self) -> tuple[int, float] | None:
        try:
            tree = json.loads((self._folder / SCORE).read_text())
            return int(tree["step"]), float(tree["score"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def newest_complete(self, lineage: str | None = None) -> Checkpoint | None:
        return newest_complete(self._folder, lineage)

    def note_elsewhere(self, listed: Sequence[RemoteCheckpoint], url: str) -> None:
        """Record complete checkpoints of a store; raises `FencedError`."""
        self._elsewhere = frozenset(each.local_name for each in listed)
        self._last_serial = max([self._last_serial, *(each.serial for each in listed)])
        self._files.write_json(UPLOADED, {"url": url, "checkpoints": [asdict(each) for each in listed]})

    def continue_after(self, serial: int) -> None:
        self._last_serial = max(self._last_serial, serial)

    def release(self, name: str) -> "Future[None]":
        """Remove a local checkpoint that a store has."""
        return self._thread.submit(self._release, name)

    def _release(self, name: str) -> None:
        best = self._best()
        self._listed = [each for each in self._listed if each.name != name]
        self._write_manifest(self._listed)
        if best is not None and best[0] == name:
            with suppress(FileNotFoundError):
                delete(self._files.take_away(BEST))
        self._files.remove(name)
        self._remove_unfinished()

    @property
    def paths(self) -> list[Path]:
        """Return local checkpoints in order of writing."""
        return [self._folder / each.name for each in self._listed]

    @property
    def best(self) -> str | None:
        """Return the checkpoint with the best evaluation."""
        best = self._best()
        return best[0] if best else None

    def _remove_unfinished(self) -> None:
        self._files.discard(EPOCH, REMOVED, PREFIX)
        for path in self._folder.glob(f"{TEMPORARY}*"):
            if path == self._unfinished:
                continue
            match = re.match(r"(\d+)-\d+-", path.name.removeprefix(TEMPORARY))
            if match is None or int(match[1]) <= self._files.epoch:  # without an epoch: of an earlier build
                delete(path)

    @contextmanager
    def _unsaved_if_failing(self, temporary: Path) -> Iterator[None]:
        """Convert write errors (various for a full disk) to `UnsavedError`; remove the folder."""
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:
            self._unfinished = None
            self._files.check()
            shutil.rmtree(temporary, ignore_errors=True)
            raise UnsavedError(" ".join(str(error).split())) from error


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)
