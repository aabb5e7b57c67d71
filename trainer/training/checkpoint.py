"""Checkpoints of the learner: complete, atomic, found again; the oldest are removed.

Layout of `checkpoints/step-000020`: the policy as a Hugging Face folder (weights, configuration, tokenizer), `state/`
(exact engine state), `learner.json` (`LearnerState`), `manifest.json` (size and CRC of every other file).

Invariants: a folder named `step-...` was complete when it got that name (written to a temporary folder, synced,
renamed); one that was damaged later is skipped with a warning. `best` links to the step with the best evaluation, which
is kept in addition to the newest.
"""

import itertools
import json
import logging
import math
import os
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

logger = logging.getLogger(__name__)

LEARNER = "learner.json"
MANIFEST = "manifest.json"
PREFIX = "step-"
ASIDE = ".writing-"
BEST, SCORE = "best", "best.json"
CHUNK = 1 << 22
ABANDONED_S = 3600.0
_MINE = f"{socket.gethostname()}~{os.getpid()}"
_NUMBERS = itertools.count()


class CheckpointError(Exception):
    """The requested checkpoint can't be used; the message says why."""


class UnsavedError(RuntimeError):
    """A checkpoint could not be written or made durable; it was removed, and the previous one is unchanged."""


@dataclass(frozen=True, slots=True)
class LearnerState:
    """Learner state in a checkpoint, besides weights and engine state."""

    step: int
    """Optimizer batches trained, which is also the version of the weights."""
    lineage: str
    """`LearnerRun.lineage` of the run that wrote it."""
    entry_ids: tuple[str, ...] = ()
    """Entries consumed since the last acknowledgement; acknowledged once this checkpoint is durable."""
    next_number: int = 0
    """One past the highest group number that was consumed."""
    kl_coef: float = 0.0
    num_processes: int = 1
    """Data-parallel processes that wrote it."""
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    """The run's configuration, for humans and tools."""
    serial: int = field(default=0, compare=False)
    """Larger than the serial of every checkpoint in the folder at the time of writing, whatever their steps."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    state: LearnerState


class CheckpointStore:
    """The checkpoints of one output folder."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._asides: list[Path] = []

    def save(self, state: LearnerState, write: Callable[[Path], None]) -> "Future[Path]":
        """Write a checkpoint: `write` fills a new folder with weights and engine state before this returns.

        Returns a future of its path, done once it is durable and older ones than the newest `keep` are removed:
        digests, syncing and renaming happen in the background. The previous future must be done.

        Raises:
            UnsavedError: it could not be written; the future raises it if it could not be made durable.
        """
        target = self._folder / f"{PREFIX}{state.step:06d}"
        aside = self._folder / f"{ASIDE}{_MINE}-{next(_NUMBERS)}-{target.name}"
        with _removed_if_unsaved(aside):
            self._folder.mkdir(parents=True, exist_ok=True)
            aside.mkdir()
            self._asides.append(aside)
            write(aside)
            serial = 1 + max((_serial_of(path) for path in self._folder.glob(f"{PREFIX}*")), default=0)
            _write_json(aside / LEARNER, asdict(replace(state, serial=serial)))
        return self._thread.submit(self._make_durable, aside, target)

    def _make_durable(self, aside: Path, target: Path) -> Path:
        with _removed_if_unsaved(aside):
            self._name(aside, target)
        self._collect(target)
        return target

    def _name(self, aside: Path, target: Path) -> None:
        """Sync what was written, and give it its name."""
        _write_json(aside / MANIFEST, {str(p.relative_to(aside)): _fingerprint(p) for p in _files(aside)})
        _sync(aside)
        if target.exists():
            self._make_room(target, aside)
        if aside.exists():
            aside.rename(target)
        _sync_folder(self._folder)

    def _make_room(self, target: Path, aside: Path) -> None:
        """There is a folder of that name: a learner that was thought dead may have written the same one, which then stays;
        another lineage's, or a damaged one, would not have been gone on from, and goes."""
        lineage = json.loads((aside / LEARNER).read_text())["lineage"]
        try:
            same = read_checkpoint(target).state.lineage == lineage
        except CheckpointError:
            same = False
        if same:
            shutil.rmtree(aside)
            return
        old = aside.with_name(f"{aside.name}-old")
        target.rename(old)
        aside.rename(target)
        shutil.rmtree(old, ignore_errors=True)

    def score(self, step: int, value: float) -> None:
        """Record the score of `step`; the best checkpoint is kept in addition to the newest, and `best` links to it."""
        path = self._folder / f"{PREFIX}{step:06d}"
        best = self._best()
        # A step may be trained again, to other weights
        beaten = best is None or best[0] == path.name or best[1] <= value
        if not path.is_dir() or not math.isfinite(value) or not beaten:
            return
        aside = self._folder / f"{ASIDE}{_MINE}-{BEST}"
        _write_json(aside, {"step": step, "score": value})
        aside.replace(self._folder / SCORE)
        aside.symlink_to(path.name)
        aside.replace(self._folder / BEST)

    def _best(self) -> tuple[str, float] | None:
        """Name and score of the best checkpoint, if it is still there."""
        try:
            tree = json.loads((self._folder / SCORE).read_text())
            name, score = f"{PREFIX}{int(tree['step']):06d}", float(tree["score"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return (name, score) if (self._folder / name).is_dir() else None

    def newest_complete(self, lineage: str | None = None) -> Checkpoint | None:
        """The newest whole checkpoint, of one lineage, or of any the one that was written last: a run that went back to an
        earlier step has left later ones behind. Damaged ones are skipped with a warning."""
        paths = sorted(self._folder.glob(f"{PREFIX}*"), key=_step_of, reverse=True)
        for path in paths if lineage is not None else sorted(paths, key=_serial_of, reverse=True):
            try:
                checkpoint = read_checkpoint(path)
            except CheckpointError as error:
                logger.warning("%s is skipped: %s", path, error)
                continue
            if lineage is None or checkpoint.state.lineage == lineage:
                return checkpoint
        return None

    def _collect(self, newest: Path) -> None:
        best = self._best()
        spared = {newest.name, best[0] if best else newest.name}
        written = {path: path.stat().st_mtime for path in self._folder.glob(f"{PREFIX}*") if path.name not in spared}
        # What is newer is of a learner that has replaced this one
        older = [path for path in written if written[path] <= newest.stat().st_mtime]
        for path in sorted(older, key=lambda p: written[p], reverse=True)[self._keep - 1 :]:
            shutil.rmtree(path, ignore_errors=True)
        for left_over in self._folder.glob(f"{ASIDE}*-{PREFIX}*"):
            if left_over in self._asides or _is_abandoned(left_over):
                shutil.rmtree(left_over, ignore_errors=True)


@contextmanager
def _removed_if_unsaved(aside: Path) -> Iterator[None]:
    """Translate errors of a full disk: an OSError, or a library's own error with the system's message."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UnsavedError(" ".join(str(error).split())) from error


def _is_abandoned(aside: Path) -> bool:
    """Return True if its writer is gone: a process of this host that has exited, or one of another host that has not
    touched it for long."""
    host, _, rest = aside.name.removeprefix(ASIDE).partition("~")
    try:
        if host == socket.gethostname():
            pid = int(rest.partition("-")[0])
            return not Path(f"/proc/{pid}").exists()
        return time.time() - aside.stat().st_mtime > ABANDONED_S
    except (OSError, ValueError):
        return False


def read_checkpoint(path: Path) -> Checkpoint:
    """Check a checkpoint and read its state.

    Raises:
        CheckpointError: it is incomplete, damaged, or of another build.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        missing = [name for name in manifest if not (path / name).is_file()]
        if missing:
            raise CheckpointError(f"{', '.join(missing)} is missing")
        for name, expected in manifest.items():
            if _fingerprint(path / name) != expected:
                raise CheckpointError(f"{name} is damaged")
        tree = json.loads((path / LEARNER).read_text())
        return Checkpoint(path, LearnerState(**{**tree, "entry_ids": tuple(tree["entry_ids"])}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"not a whole checkpoint: {error}") from error


def _step_of(path: Path) -> int:
    digits = path.name.removeprefix(PREFIX)
    return int(digits) if digits.isdigit() else -1


def _serial_of(path: Path) -> int:
    """Return the serial in the checkpoint, complete or not."""
    try:
        return int(json.loads((path / LEARNER).read_text())["serial"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)


def _fingerprint(path: Path) -> list[int]:
    """[bytes, CRC-32]."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
        return [file.tell(), crc]


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _sync(folder: Path) -> None:
    """Bring a folder's files and names to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            _sync_path(path, os.O_RDONLY)
    for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        _sync_folder(path)


def _sync_folder(folder: Path) -> None:
    _sync_path(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync_path(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
