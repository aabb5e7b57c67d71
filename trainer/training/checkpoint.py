"""Atomic, verified checkpoints.

`checkpoints/step-000020`: a Hugging Face folder with `state/` (engine), `learner.json` (`LearnerState`) and
`manifest.json` (size and CRC of every other file). `checkpoints/manifest.json`: the checkpoints in order of writing,
their lineage, and the writer's epoch. `best`: link to the step with the best evaluation, kept besides the newest.

Invariant: a `step-...` folder was complete and synced when renamed; a damaged one is skipped.
"""

import json
import logging
import zlib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from offbeat.trainer.training.fenced_folder import entries, newest_epoch_folder, staged_entries

logger = logging.getLogger(__name__)

LEARNER = "learner.json"
MANIFEST = "manifest.json"
PREFIX = "step-"
BEST, SCORE = "best", "best.json"
UPLOADED = "uploaded.json"
READ_SIZE = 1 << 22


class CheckpointError(Exception):
    """Unusable requested checkpoint."""


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


def newest_complete(folder: Path, lineage: str | None = None) -> Checkpoint | None:
    """Return a lineage's highest complete checkpoint; without a lineage, the last written."""
    # A learner that died while it replaced a checkpoint has left the new one in its epoch's folder
    paths = (*entries(folder), *staged_entries(folder))
    described = [(path, describe(path)) for path in paths if is_checkpoint(path)]
    for path, _ in sorted(
        described, key=lambda pair: writing_order(pair[1], by_step=lineage is not None), reverse=True
    ):
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
    described = [describe(path) for path in entries(folder) if is_checkpoint(path)]
    return max(described, key=writing_order, default=None)


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


def is_checkpoint(path: Path) -> bool:
    return path.name.startswith(PREFIX) and path.name.removeprefix(PREFIX).isdecimal() and path.is_dir()


def describe(path: Path, listed: ListedCheckpoint | None = None) -> ListedCheckpoint:
    """Describe a checkpoint from itself, else the manifest, else as the first to remove."""
    step = int(path.name.removeprefix(PREFIX))
    try:
        tree = json.loads((path / LEARNER).read_text())
        return ListedCheckpoint(path.name, step, tree["lineage"], int(tree["serial"]), int(tree.get("epoch", 0)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return listed or ListedCheckpoint(path.name, step, "", 0, 0)


def writing_order(checkpoint: ListedCheckpoint, *, by_step: bool = False) -> tuple[int, int]:
    serial, step = checkpoint.serial, checkpoint.step
    return (step, serial) if by_step else (serial, step)


def fingerprint(path: Path) -> list[int]:
    """Return size and CRC."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(READ_SIZE):
            crc = zlib.crc32(chunk, crc)
        return [file.tell(), crc]
