"""Atomic, verified checkpoints.

`checkpoints/step-000020`: a Hugging Face folder with `state/` (engine), `learner.json` (`LearnerState`) and
`manifest.json` (size and CRC of every other file). `checkpoints/manifest.json`: the checkpoints in order of writing,
their lineage, and the writer's epoch. `best`: link to the step with the best evaluation, kept besides the newest.

Invariants: a `step-...` folder was complete and synced when renamed; a damaged one is skipped. Only the holder of the
newest lease changes anything.
"""

import itertools
import json
import logging
import math
import re
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from offbeat.services.durable_files import sync_tree, write_json
from offbeat.services.errors import FencedError
from offbeat.trainer.training.fenced_folder import (
    EPOCH,
    REMOVED,
    FencedFolder,
    delete,
    entries,
    newest_epoch_folder,
    staged_entries,
)

logger = logging.getLogger(__name__)

LEARNER = "learner.json"
MANIFEST = "manifest.json"
PREFIX = "step-"
TEMPORARY = ".writing-"
BEST, SCORE = "best", "best.json"
UPLOADED = "uploaded.json"
READ_SIZE = 1 << 22
SCHEMA = 1


class CheckpointError(Exception):
    """Unusable requested checkpoint."""


class UnsavedError(RuntimeError):
    """Failed checkpoint, already removed."""


@dataclass(frozen=True, slots=True)
class LearnerState:
    """State besides the engine's."""

    step: int
    lineage: str
    entry_ids: tuple[str, ...] = ()
    """Of the buffer, to acknowledge once durable."""
    next_number: int = 0
    """One past the highest consumed group."""
    kl_coef: float = 0.0
    num_processes: int = 1
    """Of the policy."""
    num_critic_processes: int = 0
    """Of a critic with processes of its own."""
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    serial: int = field(default=0, compare=False)
    """Order of writing, not always that of steps."""
    epoch: int = field(default=0, compare=False)
    """Writer's lease epoch; 0 from earlier builds."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    state: LearnerState


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    name: str
    step: int
    lineage: str
    serial: int
    epoch: int


@dataclass(frozen=True, slots=True)
class RemoteCheckpoint:
    """Checkpoint `name` in a run's folder of a store."""

    name: str
    step: int
    lineage: str
    serial: int
    epoch: int

    @property
    def local_name(self) -> str:
        return f"{PREFIX}{self.step:06d}"


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
            if not _is_checkpoint(path) or (earlier.exists() and _describe(earlier).serial > _describe(path).serial):
                continue
            with suppress(CheckpointError):
                read_checkpoint(path)
                self._replace(path, path.name)
        named = {each.name: each for each in read_manifest(self._folder)}
        paths = [path for path in entries(self._folder) if _is_checkpoint(path)]
        return sorted((_describe(path, named.get(path.name)) for path in paths), key=_order)

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
        newest = candidates[len(candidates) - (self._keep - 1) :] if self._keep > 1 else []
        pinned = self.pinned()
        kept = [each for each in others if each in newest or each not in candidates or each.name in pinned]
        return [*kept, new]

    def _write_manifest(self, listed: list[ListedCheckpoint]) -> None:
        tree = {"schema": SCHEMA, "epoch": self._files.epoch, "checkpoints": [asdict(each) for each in listed]}
        self._files.write_json(MANIFEST, tree)

    def score(self, step: int, value: float) -> None:
        """Record a step's score and update `best`; raises `FencedError`."""
        path = self._folder / f"{PREFIX}{step:06d}"
        best = self._best()
        # After a resume, the same step may have different weights and another score
        is_best = best is None or best[0] == path.name or best[1] <= value
        if not self._has(path.name) or not math.isfinite(value) or not is_best:
            return
        self._files.write_json(SCORE, {"step": step, "score": value})
        if path.is_dir():
            self._files.link(BEST, path.name)

    def _has(self, name: str) -> bool:
        return (self._folder / name).is_dir() or name in self._elsewhere

    def _best(self) -> tuple[str, float] | None:
        try:
            tree = json.loads((self._folder / SCORE).read_text())
            name, score = f"{PREFIX}{int(tree['step']):06d}", float(tree["score"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return (name, score) if self._has(name) else None

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
                self._files.take_away(BEST)
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


def newest_complete(folder: Path, lineage: str | None = None) -> Checkpoint | None:
    """Return a lineage's highest complete checkpoint; without a lineage, the last written."""
    # A learner that died while it replaced a checkpoint has left the new one in its epoch's folder
    paths = (*entries(folder), *staged_entries(folder))
    described = [(path, _describe(path)) for path in paths if _is_checkpoint(path)]
    for path, _ in sorted(described, key=lambda pair: _order(pair[1], by_step=lineage is not None), reverse=True):
        try:
            checkpoint = read_checkpoint(path)
        except CheckpointError as error:
            logger.warning("skipping checkpoint %s: %s", path, error)
            continue
        if lineage is None or checkpoint.state.lineage == lineage:
            return checkpoint
    return None


def last_written(folder: Path) -> ListedCheckpoint | None:
    """Return the checkpoint written last, unverified."""
    described = [_describe(path) for path in entries(folder) if _is_checkpoint(path)]
    return max(described, key=_order, default=None)


def read_checkpoint(path: Path) -> Checkpoint:
    """Verify and read a checkpoint.

    Raises:
        CheckpointError: incomplete, damaged, or of another build.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        missing = [name for name in manifest if not (path / name).is_file()]
        if missing:
            raise CheckpointError(f"{', '.join(missing)} is missing")
        for name, expected in manifest.items():
            if fingerprint(path / name) != expected:
                raise CheckpointError(f"{name} is damaged")
        tree = json.loads((path / LEARNER).read_text())
        known = {each.name: tree[each.name] for each in fields(LearnerState) if each.name in tree}
        return Checkpoint(path, LearnerState(**{**known, "entry_ids": tuple(tree["entry_ids"])}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"not a complete checkpoint: {error}") from error


def read_manifest(folder: Path) -> list[ListedCheckpoint]:
    """Return the listed checkpoints, oldest first; none if unreadable."""
    try:
        return [ListedCheckpoint(**each) for each in json.loads((folder / MANIFEST).read_text())["checkpoints"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def read_uploaded(folder: Path) -> tuple[str, list[RemoteCheckpoint]]:
    """Return the URL of the run's folder in a store and its complete checkpoints, oldest first; empty if unknown."""
    try:
        tree = json.loads((folder / UPLOADED).read_text())
        return str(tree["url"]), [RemoteCheckpoint(**each) for each in tree["checkpoints"]]
    except (OSError, ValueError, KeyError, TypeError):
        return "", []


def read_epoch(folder: Path) -> int:
    """Return the folder's newest epoch; 0 if none or unknown."""
    try:
        epoch = int(json.loads((folder / MANIFEST).read_text())["epoch"])
    except (OSError, ValueError, KeyError, TypeError):
        epoch = 0
    return max(epoch, newest_epoch_folder(folder))


def _is_checkpoint(path: Path) -> bool:
    return path.name.startswith(PREFIX) and path.name.removeprefix(PREFIX).isdecimal() and path.is_dir()


def _describe(path: Path, listed: ListedCheckpoint | None = None) -> ListedCheckpoint:
    """Describe a checkpoint from itself, else the manifest, else as the first to remove."""
    step = int(path.name.removeprefix(PREFIX))
    try:
        tree = json.loads((path / LEARNER).read_text())
        return ListedCheckpoint(path.name, step, tree["lineage"], int(tree["serial"]), int(tree.get("epoch", 0)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return listed or ListedCheckpoint(path.name, step, "", 0, 0)


def _order(checkpoint: ListedCheckpoint, *, by_step: bool = False) -> tuple[int, int]:
    serial, step = checkpoint.serial, checkpoint.step
    return (step, serial) if by_step else (serial, step)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)


def fingerprint(path: Path) -> list[int]:
    """Return size and CRC."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(READ_SIZE):
            crc = zlib.crc32(chunk, crc)
        return [file.tell(), crc]
