"""Run folder.

Layout: `config.yaml`, `report.json`, `checkpoints/`, `ledger/`, `batches/`, `evaluations/`, `metrics.jsonl`,
`tensorboard/`, `trackers/`, `logs/`, `redis/` (AOF), `policy/` (tiny policy's files), `start/` (warm-started weights),
`episodes.gif` and `.html`, `learning_curve.png`, `endpoints.json` while running.

Invariants: at most one command runs in a folder; only a run's own files are removed, and none while it runs.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

LOCK = ".lock"
ENDPOINTS = "endpoints.json"
CONFIG = "config.yaml"
MARKS = (CONFIG, "checkpoints", "ledger", "redis", "report.json")
WRITTEN = (
    "batches",
    "checkpoints",
    "config.yaml",
    "episodes.gif",
    "episodes.html",
    "evaluations",
    "learning_curve.png",
    "ledger",
    "logs",
    "metrics.jsonl",
    "policy",
    "report.json",
    "start",
    "tensorboard",
    "trackers",
    "weights",
    ".claim",
    ".report.json.part",
)
"""Files of runs and reports; `LOCK` is removed last."""


class FolderInUseError(Exception):
    """Folder locked by another command."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses of a run's services."""

    pid: int
    redis_url: str
    control_url: str


def holds_run(folder: Path) -> bool:
    """Return True if the folder has a run's files."""
    return any((folder / mark).exists() for mark in MARKS)


def make_private(folder: Path) -> None:
    """Make a run's folder, which holds prompts and trajectories, for its owner alone; an existing one keeps its mode."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def newest_checkpoint(folder: Path) -> tuple[int, Path] | None:
    """Return the newest checkpoint's step and folder, if any."""
    written = (path for path in (folder / "checkpoints").glob("step-*") if path.name[5:].isdecimal())
    newest = max(written, key=lambda path: path.stat().st_mtime, default=None)
    return (int(newest.name[5:]), newest) if newest else None


def move_aside(folder: Path) -> Path:
    """Rename the folder to the first free `<folder>.1`, `<folder>.2`, ...; return it."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder until the context or process ends.

    Raises:
        FolderInUseError: locked by another process.
    """
    make_private(folder)
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


def running_pid(folder: Path) -> int | None:
    """Return the pid of a running run."""
    lock = folder / LOCK
    try:
        process = psutil.Process(int(lock.read_text()))
        is_holder = process.create_time() <= lock.stat().st_mtime  # a later process has got its pid again
        return process.pid if is_holder and process.status() != psutil.STATUS_ZOMBIE else None
    except (OSError, ValueError, psutil.Error):
        return None


def claim(folder: Path, *, resume: bool) -> Path | None:
    """Move an earlier run aside unless resumed; return its new path.

    Raises:
        FolderInUseError: it is still running.
    """
    if resume or not holds_run(folder):
        return None
    with locked(folder):
        pass
    return move_aside(folder)


def write_config(folder: Path, text: str) -> None:
    """Write a configuration, readable by its owner alone: it may contain passwords."""
    path = folder / CONFIG
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(text)


def write_endpoints(folder: Path, endpoints: Endpoints) -> None:
    """Write addresses for this host's processes."""
    path = folder / ENDPOINTS
    path.touch(mode=0o600)  # the URL holds the password of Redis
    path.write_text(json.dumps(asdict(endpoints), indent=2) + "\n")


def read_endpoints(folder: Path) -> Endpoints | None:
    """Return a running run's addresses, or None."""
    try:
        endpoints = Endpoints(**json.loads((folder / ENDPOINTS).read_text()))
        os.kill(endpoints.pid, 0)
    except (OSError, ValueError, TypeError):
        return None
    return endpoints


def remove_endpoints(folder: Path) -> None:
    """Remove the addresses."""
    with suppress(FileNotFoundError):
        (folder / ENDPOINTS).unlink()


def remove_run_files(folder: Path) -> list[str]:
    """Remove a run's files, and an empty folder; return removed paths.

    Raises:
        FolderInUseError: the run is running.
    """
    if not holds_run(folder):
        return []
    removed: list[str] = []
    with locked(folder):
        for path in (folder / name for name in WRITTEN):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.exists():
                path.unlink()
            else:
                continue
            removed.append(str(path))
        (folder / LOCK).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
        removed.append(str(folder))
    return removed
