"""Atomic, verified checkpoints.

Layout of `checkpoints/step-000020`: a Hugging Face folder (weights, configuration, tokenizer), `state/` (engine state),
`learner.json` (`LearnerState`), `manifest.json` (size and CRC of every other file).

Invariant: a `step-...` folder was complete and synced when renamed; one damaged later is skipped. `best` links to the
step with the best evaluation, kept in addition to the newest.
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
TEMPORARY = ".writing-"
BEST, SCORE = "best", "best.json"
READ_SIZE = 1 << 22
ABANDONED_AFTER_S = 3600.0
"""Age at which another host's temporary folder is removed."""
_WRITER = f"{socket.gethostname()}~{os.getpid()}"
_SEQUENCE = itertools.count()


class CheckpointError(Exception):
    """Unusable requested checkpoint."""


class UnsavedError(RuntimeError):
    """Failed checkpoint, which was removed; the previous one is unchanged."""


@dataclass(frozen=True, slots=True)
class LearnerState:
    """Learner state besides the engine's."""

    step: int
    lineage: str
    entry_ids: tuple[str, ...] = ()
    """Entries to acknowledge once this checkpoint is durable."""
    next_number: int = 0
    """One past the highest consumed group number."""
    kl_coef: float = 0.0
    num_processes: int = 1
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    serial: int = field(default=0, compare=False)
    """Order of writing, which may differ from step order."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Complete checkpoint."""

    path: Path
    state: LearnerState


class CheckpointStore:
    """Checkpoints of one folder."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._temporary: list[Path] = []

    def save(self, state: LearnerState, write: Callable[[Path], None]) -> "Future[Path]":
        """Write a checkpoint; the future is done once it is durable and old ones are removed.

        `write` fills a new folder in the foreground; digests, syncing and renaming run in the background. The previous
        future must be done.

        Raises:
            UnsavedError: the write failed, here or in the future.
        """
        target = self._folder / f"{PREFIX}{state.step:06d}"
        temporary = self._folder / f"{TEMPORARY}{_WRITER}-{next(_SEQUENCE)}-{target.name}"
        with _remove_if_unsaved(temporary):
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            self._temporary.append(temporary)
            write(temporary)
            serial = 1 + max((_serial_of(path) for path in self._folder.glob(f"{PREFIX}*")), default=0)
            _write_json(temporary / LEARNER, asdict(replace(state, serial=serial)))
        return self._thread.submit(self._make_durable, temporary, target)

    def _make_durable(self, temporary: Path, target: Path) -> Path:
        with _remove_if_unsaved(temporary):
            self._rename(temporary, target)
        self._remove_old(target)
        return target

    def _rename(self, temporary: Path, target: Path) -> None:
        _write_json(temporary / MANIFEST, {str(p.relative_to(temporary)): _fingerprint(p) for p in _files(temporary)})
        _sync(temporary)
        if target.exists():
            self._replace_existing(target, temporary)
        if temporary.exists():
            temporary.rename(target)
        _sync_folder(self._folder)

    def _replace_existing(self, target: Path, temporary: Path) -> None:
        """Replace a checkpoint that is damaged or of another lineage; one of the same lineage was written by a learner
        presumed dead.
        """
        lineage = json.loads((temporary / LEARNER).read_text())["lineage"]
        try:
            same = read_checkpoint(target).state.lineage == lineage
        except CheckpointError:
            same = False
        if same:
            shutil.rmtree(temporary)
            return
        old = temporary.with_name(f"{temporary.name}-old")
        target.rename(old)
        temporary.rename(target)
        shutil.rmtree(old, ignore_errors=True)

    def score(self, step: int, value: float) -> None:
        """Record the score of `step` and update `best`."""
        path = self._folder / f"{PREFIX}{step:06d}"
        best = self._best()
        # After a resume, the same step may have different weights and another score
        is_best = best is None or best[0] == path.name or best[1] <= value
        if not path.is_dir() or not math.isfinite(value) or not is_best:
            return
        temporary = self._folder / f"{TEMPORARY}{_WRITER}-{BEST}"
        _write_json(temporary, {"step": step, "score": value})
        temporary.replace(self._folder / SCORE)
        temporary.symlink_to(path.name)
        temporary.replace(self._folder / BEST)

    def _best(self) -> tuple[str, float] | None:
        try:
            tree = json.loads((self._folder / SCORE).read_text())
            name, score = f"{PREFIX}{int(tree['step']):06d}", float(tree["score"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return (name, score) if (self._folder / name).is_dir() else None

    def newest_complete(self, lineage: str | None = None) -> Checkpoint | None:
        """Return a lineage's complete checkpoint of the highest step; without a lineage, the last written."""
        paths = sorted(self._folder.glob(f"{PREFIX}*"), key=_step_of, reverse=True)
        for path in paths if lineage is not None else sorted(paths, key=_serial_of, reverse=True):
            try:
                checkpoint = read_checkpoint(path)
            except CheckpointError as error:
                logger.warning("skipping checkpoint %s: %s", path, error)
                continue
            if lineage is None or checkpoint.state.lineage == lineage:
                return checkpoint
        return None

    def _remove_old(self, newest: Path) -> None:
        best = self._best()
        retained = {newest.name, best[0] if best else newest.name}
        written = {path: path.stat().st_mtime for path in self._folder.glob(f"{PREFIX}*") if path.name not in retained}
        # Newer ones belong to a learner that has taken over
        older = [path for path in written if written[path] <= newest.stat().st_mtime]
        for path in sorted(older, key=lambda p: written[p], reverse=True)[self._keep - 1 :]:
            shutil.rmtree(path, ignore_errors=True)
        for path in self._folder.glob(f"{TEMPORARY}*-{PREFIX}*"):
            if path in self._temporary or _is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _remove_if_unsaved(temporary: Path) -> Iterator[None]:
    """Convert write errors to UnsavedError and remove the folder; libraries report a full disk as various errors."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UnsavedError(" ".join(str(error).split())) from error


def _is_abandoned(temporary: Path) -> bool:
    """Return whether the writer has exited or, on another host, is presumed dead."""
    host, _, rest = temporary.name.removeprefix(TEMPORARY).partition("~")
    try:
        if host == socket.gethostname():
            pid = int(rest.partition("-")[0])
            return not Path(f"/proc/{pid}").exists()
        return time.time() - temporary.stat().st_mtime > ABANDONED_AFTER_S
    except (OSError, ValueError):
        return False


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
            if _fingerprint(path / name) != expected:
                raise CheckpointError(f"{name} is damaged")
        tree = json.loads((path / LEARNER).read_text())
        return Checkpoint(path, LearnerState(**{**tree, "entry_ids": tuple(tree["entry_ids"])}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"not a complete checkpoint: {error}") from error


def _step_of(path: Path) -> int:
    digits = path.name.removeprefix(PREFIX)
    return int(digits) if digits.isdigit() else -1


def _serial_of(path: Path) -> int:
    try:
        return int(json.loads((path / LEARNER).read_text())["serial"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)


def _fingerprint(path: Path) -> list[int]:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(READ_SIZE):
            crc = zlib.crc32(chunk, crc)
        return [file.tell(), crc]


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _sync(folder: Path) -> None:
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
