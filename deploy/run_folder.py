"""A run's folder: who uses it now, and what becomes of an earlier run in it.

Layout: `config.yaml`, `report.json`, `checkpoints/`, `ledger/`, `batches/`, `evaluations/`, `metrics.jsonl`, `tensorboard/`,
`trackers/`, `logs/`, `redis/` (the embedded server's AOF), `policy/` (the tiny policy's files), `start/` (the weights after
the warm start), `episodes.gif` and `.html`, `learning_curve.png`, `endpoints.json` while it runs.

Invariant: at most one command runs a run in a folder.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

LOCK = ".lock"
ENDPOINTS = "endpoints.json"
CONFIG = "config.yaml"
MARKS = (CONFIG, "checkpoints", "ledger", "redis", "report.json")
"""A folder that holds one of these holds a run."""


class FolderInUseError(Exception):
    """Another command runs a run in the folder."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the services of a running run listen."""

    pid: int
    redis_url: str
    control_url: str


def holds_run(folder: Path) -> bool:
    """Whether an earlier run left something there."""
    return any((folder / mark).exists() for mark in MARKS)


def newest_checkpoint(folder: Path) -> tuple[int, Path] | None:
    """Step and place of the checkpoint that was written last; None before the first one."""
    written = (path for path in (folder / "checkpoints").glob("step-*") if path.name[5:].isdecimal())
    newest = max(written, key=lambda path: path.stat().st_mtime, default=None)
    return (int(newest.name[5:]), newest) if newest else None


def move_aside(folder: Path) -> Path:
    """Rename the folder to the first free one of `<folder>.1`, `<folder>.2`, ...; returns where it lies now."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; the lock goes with the process, however it ends.

    Raises:
        FolderInUseError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 32).decode().strip() or "?"
            raise FolderInUseError(
                f"{folder} is used by process {holder}: stop it, or set another output_dir"
            ) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        os.close(descriptor)


def claim(folder: Path, *, resume: bool) -> Path | None:
    """Make room for a run: an earlier one that is not resumed is moved aside; returns where it lies now.

    Raises:
        FolderInUseError: it is being run.
    """
    if resume or not holds_run(folder):
        return None
    with locked(folder):
        pass
    return move_aside(folder)


def write_config(folder: Path, text: str) -> None:
    """Keep a run's whole configuration, for its owner alone: a Redis' password and the API's tokens may stand in it."""
    path = folder / CONFIG
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(text)


def write_endpoints(folder: Path, endpoints: Endpoints) -> None:
    """Tell other terminals where the services listen."""
    path = folder / ENDPOINTS
    path.touch(mode=0o600)  # the URL holds the password of Redis
    path.write_text(json.dumps(asdict(endpoints), indent=2) + "\n")


def read_endpoints(folder: Path) -> Endpoints | None:
    """Where the services of the folder's run listen; None when it does not run."""
    try:
        found = Endpoints(**json.loads((folder / ENDPOINTS).read_text()))
        os.kill(found.pid, 0)
    except (OSError, ValueError, TypeError):
        return None
    return found


def remove_endpoints(folder: Path) -> None:
    """The services listen no more."""
    with suppress(FileNotFoundError):
        (folder / ENDPOINTS).unlink()
