"""Checkpoints of the learner: complete, atomic, found again, and the oldest collected.

Layout of `checkpoints/step-000020`: the policy as a Hugging Face folder (weights, configuration, tokenizer), `state/` (what
the engines need to go on exactly), `learner.json` (`LearnerState`), `manifest.json` (every other file's size and CRC).

Invariants: a folder named `step-...` was whole when it got that name (it is written aside, synced, then renamed); one that
has been damaged since is skipped and said so.
"""

import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

LEARNER = "learner.json"
MANIFEST = "manifest.json"
PREFIX = "step-"
ASIDE = ".writing-"
CHUNK = 1 << 22


class CheckpointError(Exception):
    """A checkpoint that was asked for can't be used; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class LearnerState:
    """What a checkpoint says beside weights and engine states."""

    step: int
    """Optimizer batches trained, which is also the version of the weights."""
    lineage: str
    """`LearnerRun.lineage` of the run that wrote it."""
    entry_ids: tuple[str, ...] = ()
    """Consumed since the last acknowledgement: to be acknowledged once this checkpoint stands."""
    next_number: int = 0
    """One past the highest group number that was consumed."""
    kl_coef: float = 0.0
    num_processes: int = 1
    """Data-parallel processes that wrote it."""
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    """The run's configuration, for people and tools."""


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

    def save(self, state: LearnerState, write: Callable[[Path], None]) -> Path:
        """Write a checkpoint: `write` fills a fresh folder with weights and engine states.

        Returns when it is durable; older ones than the newest `keep` are gone then.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._folder / f"{PREFIX}{state.step:06d}"
        aside = self._folder / f"{ASIDE}{target.name}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        write(aside)
        _write_json(aside / LEARNER, asdict(state))
        _write_json(aside / MANIFEST, {str(p.relative_to(aside)): _fingerprint(p) for p in _files(aside)})
        _sync(aside)
        if target.exists():
            # Another lineage's, or damaged: it would have been resumed from otherwise
            shutil.rmtree(target)
        aside.rename(target)
        _sync_folder(self._folder)
        self._collect(target)
        return target

    def newest_complete(self, lineage: str | None = None) -> Checkpoint | None:
        """The newest whole checkpoint, of one lineage or of any; damaged ones are skipped with a warning."""
        for path in sorted(self._folder.glob(f"{PREFIX}*"), key=_step_of, reverse=True):
            try:
                checkpoint = read_checkpoint(path)
            except CheckpointError as error:
                logger.warning("%s is skipped: %s", path, error)
                continue
            if lineage is None or checkpoint.state.lineage == lineage:
                return checkpoint
        return None

    def _collect(self, newest: Path) -> None:
        older = [path for path in self._folder.glob(f"{PREFIX}*") if path != newest]
        for path in sorted(older, key=lambda p: p.stat().st_mtime, reverse=True)[self._keep - 1 :]:
            shutil.rmtree(path, ignore_errors=True)
        for left_over in self._folder.glob(f"{ASIDE}*"):
            shutil.rmtree(left_over, ignore_errors=True)


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
