"""Run folder.

Layout: `WRITTEN`, with the tiny policy's files in `policy/` and warm-started weights in `start/`; `redis/` (AOF);
`endpoints.json` while running.

Invariants: at most one command runs in a folder; only a run's own files are moved or removed, and none while it runs.
`offbeat train` locks `LOCK`, a mesh's control service `CLAIM`.
"""

import fcntl
import fnmatch
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from offbeat.deploy import run_marker
from offbeat.deploy.run_marker import MARKER, FolderInUseError, find_conflict, identify, mark
from offbeat.services.control.interfaces import Removal
from offbeat.trainer.training.checkpoint import last_written, read_uploaded

CONFIG = run_marker.CONFIG
CONFIG_PART = f".{CONFIG}.part"
LOCK = ".lock"
LOCK_ATTEMPTS, LOCK_POLL_S = 5, 0.02
"""`find_holder` takes the lock for a moment."""
BOOT_ID, PID_NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
ENDPOINTS = "endpoints.json"
CLAIM = ".claim"
"""Run of a mesh that has the folder: its name, and the time at which it was recorded."""
REDIS = "redis"
MARKS = (CONFIG, "checkpoints", "ledger", "redis", "report.json")
WRITTEN = {
    "batches": ("*.msgpack", ".epoch-*"),
    "checkpoints": (
        *("step-" + digits * "[0-9]" for digits in range(6, 11)),
        "best",
        "best.json",
        "manifest.json",
        "uploaded.json",
        ".writing-*",
        ".epoch-*",
    ),
    CONFIG: (),
    "episodes.gif": (),
    "episodes.html": (),
    "evaluations": ("*.jsonl", "*.trajectories", ".epoch-*"),
    "history.msgpack": (),
    "learning_curve.png": (),
    "ledger": ("groups.jsonl", "steps.jsonl"),
    "logs": (),
    "metrics.jsonl": (),
    "policy": (),
    "profiler": ("step-*",),
    "report.json": (),
    "restored": (),
    "start": (),
    "tensorboard": (),
    "trackers": (),
    "weights": ("offbeat-*",),
    CLAIM: (),
    CONFIG_PART: (),
    ".history.msgpack.part": (),
    ".report.json.part": (),
    ".start-*": (),
}
"""Entry -> patterns of a run's files in it; nothing: all."""
OWN = (*WRITTEN, REDIS, ENDPOINTS, f"{MARKER}*", LOCK)


@dataclass(frozen=True, slots=True)
class LockHolder:
    """Process that has a folder's lock. place: the boot and the namespace in which `pid` is valid."""

    pid: int
    place: str
    host: str

    @property
    def is_here(self) -> bool:
        return self.place == _own_place()

    def __str__(self) -> str:
        return f"process {self.pid or '?'}" + (f" of {self.host}" if self.host and not self.is_here else "")

    @classmethod
    def own(cls) -> "LockHolder":
        return cls(os.getpid(), _own_place(), platform.node())

    def encode(self) -> bytes:
        return f"{self.pid} {self.place} {self.host}".encode()

    @classmethod
    def decode(cls, raw: bytes) -> "LockHolder":
        """Decode a lock's text, which its holder may not have written yet."""
        pid, place, host = [*raw.decode(errors="replace").split(" "), "", ""][:3]
        return cls(int(pid) if pid.isdecimal() else 0, place, host)


@dataclass(frozen=True, slots=True)
class Endpoints:
    pid: int
    redis_url: str
    control_url: str


def holds_run(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in MARKS)


def make_private(folder: Path) -> None:
    """Make an owner-only folder; an existing one keeps its mode."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def newest_checkpoint(folder: Path) -> tuple[int, Path] | None:
    """Return step and folder of the checkpoint written last."""
    newest = last_written(folder / "checkpoints")
    return (newest.step, folder / "checkpoints" / newest.name) if newest else None


def newest_saved(folder: Path) -> tuple[int, Path | str] | None:
    """Return step and folder, or URL in the store, of the checkpoint written last."""
    newest, (url, uploaded) = last_written(folder / "checkpoints"), read_uploaded(folder / "checkpoints")
    if uploaded and (newest is None or uploaded[-1].serial > newest.serial):
        return uploaded[-1].step, f"{url}/{uploaded[-1].name}"
    return newest_checkpoint(folder)


def move_aside(folder: Path) -> Path:
    """Move the run to the first free `<folder>.1`, `<folder>.2`, ...; other files stay."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    own, others = split_entries(folder)
    if not others:
        folder.rename(aside)
        return aside
    aside.mkdir(mode=0o700)
    # The marker last: a move that was interrupted is completed by the next command
    for path in sorted(own, key=lambda path: path.name == MARKER):
        path.rename(aside / path.name)
    return aside


def split_entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the entries with a run's names, and the others."""
    own: list[Path] = []
    others: list[Path] = []
    for path in sorted(folder.iterdir()):
        is_own = any(fnmatch.fnmatchcase(path.name, name) for name in OWN)
        (own if is_own else others).append(path)
    return own, others


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder until the context or process ends; raises `FolderInUseError`."""
    make_private(folder)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        for _ in range(LOCK_ATTEMPTS):
            if _try_lock(descriptor, fcntl.LOCK_EX):
                break
            time.sleep(LOCK_POLL_S)
        else:
            holder = LockHolder.decode((folder / LOCK).read_bytes())
            raise FolderInUseError(_in_use(folder, holder))
        os.ftruncate(descriptor, 0)
        os.write(descriptor, LockHolder.own().encode())
        yield
    finally:
        os.close(descriptor)


def find_holder(folder: Path) -> LockHolder | None:
    """Return the process that has the folder's lock, which may be of another host or container."""
    holder = _read_if_locked(folder / LOCK)
    return None if holder is None else LockHolder.decode(holder)


def lock_claim(folder: Path, claim: str) -> BinaryIO | None:
    """Lock the folder for a mesh's run until the file is closed; None if another run has it, or it can't be locked."""
    with ExitStack() as stack, suppress(OSError):  # a file system without locks
        file = stack.enter_context((folder / CLAIM).open("r+b"))
        if file.read() == claim.encode() and _try_lock(file.fileno(), fcntl.LOCK_EX):
            stack.pop_all()
            return file
    return None


def _find_user(folder: Path) -> str:
    """Return why an active run's folder can't be had, or ""."""
    if holder := find_holder(folder):
        return _in_use(folder, holder)
    if claim := _read_if_locked(folder / CLAIM):
        return _in_use(folder, f"run {claim.decode().rpartition(' ')[0]!r} of a mesh")
    return ""


def _in_use(folder: Path, user: LockHolder | str) -> str:
    return f"{folder} is used by {user}: stop it, or set another output_dir"


def _read_if_locked(path: Path) -> bytes | None:
    with suppress(OSError), path.open("rb") as file:
        return None if _try_lock(file.fileno(), fcntl.LOCK_SH) else file.read()
    return None


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _own_place() -> str:
    try:
        return f"{BOOT_ID.read_text().strip()}/{PID_NAMESPACE.readlink()}"
    except OSError:  # gVisor
        return platform.node()


def claim(folder: Path, run_id: str, *, resume: bool) -> Path | None:
    """Claim a folder, moving an earlier run aside unless resumed; return that one's new path.

    Raises `FolderInUseError` if it is running, or the folder has other files.
    """
    if problem := find_problem(folder) or _find_user(folder):
        raise FolderInUseError(problem)
    earlier, aside = identify(folder), None
    if earlier is not None and not resume:
        with locked(folder):
            aside = move_aside(folder)
        earlier = None
    make_private(folder)
    if earlier is None:
        mark(folder, run_id)
    elif (earlier.run_id, bool(earlier.incarnation)) != (run_id, True):
        with locked(folder):
            mark(folder, run_id)
    if problem := find_conflict(folder):  # another run claimed a folder above or below at the same time
        if earlier is None:
            (folder / MARKER).unlink(missing_ok=True)
        raise FolderInUseError(problem)
    (folder / CLAIM).unlink(missing_ok=True)  # of the run that had it
    return aside


def find_problem(folder: Path) -> str:
    """Return why a run can't have the folder, or ""."""
    if problem := find_conflict(folder):
        return problem
    if not folder.is_dir() or identify(folder) is not None:
        return ""
    own, _ = split_entries(folder)
    if names := [path.name for path in own if path.name != LOCK]:
        return (
            f"output_dir {folder} has {', '.join(names)}, which no run of Offbeat has written (there is no {MARKER}), and "
            "a run would write there: choose a new or empty folder"
        )
    return ""


def claim_id(run_id: str, created_at: float) -> str:
    return f"{run_id} {created_at}"


def read_claim(folder: Path) -> str:
    """Return the id of the mesh's run that has the folder, or ""."""
    try:
        return (folder / CLAIM).read_text()
    except (FileNotFoundError, NotADirectoryError):
        return ""


def write_config(folder: Path, text: str) -> None:
    """Write a configuration, owner-only, in one step."""
    part = folder / CONFIG_PART
    part.touch(mode=0o600)
    part.chmod(0o600)
    try:
        part.write_text(text)
    except OSError:
        part.unlink()
        raise
    part.replace(folder / CONFIG)


def write_endpoints(folder: Path, endpoints: Endpoints) -> None:
    path = folder / ENDPOINTS
    path.touch(mode=0o600)  # the URL holds the password of Redis
    path.write_text(json.dumps(asdict(endpoints), indent=2) + "\n")


def read_endpoints(folder: Path) -> Endpoints | None:
    try:
        endpoints = Endpoints(**json.loads((folder / ENDPOINTS).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    holder = find_holder(folder)  # a killed command leaves the file
    return endpoints if holder is not None and holder.pid == endpoints.pid else None


def remove_endpoints(folder: Path) -> None:
    with suppress(FileNotFoundError):
        (folder / ENDPOINTS).unlink()


def remove_run_files(folder: Path, run_id: str) -> Removal:
    """Remove a run's files, and the folder if then empty; raises `FolderInUseError`."""
    with hold_run_files(folder, run_id) as remove:
        return remove()


@contextmanager
def hold_run_files(folder: Path, run_id: str, claim: str | None = None) -> Iterator[Callable[[], Removal]]:
    """Yield what removes a run's files, locking the folder; raises `FolderInUseError`.

    claim: as `read_claim` returns it for the run; None: any.
    """
    if not _has_folder(folder, run_id, claim):
        left = [str(folder)] if folder.is_dir() else []
        yield lambda: Removal([], left)
        return
    with locked(folder):
        is_own = _has_folder(folder, run_id, claim)  # another run may have claimed it before the lock
        yield lambda: _remove_all(folder) if is_own else Removal([], [str(folder)])


def _has_folder(folder: Path, run_id: str, claim: str | None) -> bool:
    marker = identify(folder) if folder.is_dir() else None
    return marker is not None and marker.run_id in ("", run_id) and claim in (None, read_claim(folder))


def _remove_all(folder: Path) -> Removal:
    written = [(path, patterns) for name, patterns in WRITTEN.items() for path in folder.glob(name)]
    failed: list[Path] = []
    removed = [str(path) for path, patterns in written if _remove_written(path, patterns, failed)]
    with suppress(OSError):
        if not failed and not (folder / REDIS).exists():  # which are known as the run's by its marker
            for path in folder.glob(f"{MARKER}*"):
                path.unlink()
        (folder / LOCK).unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()
            return Removal([*removed, str(folder)], [])
    return Removal(removed, [str(path) for path in _left(folder)] or [str(folder)])


def _remove_written(path: Path, patterns: Sequence[str], failed: list[Path]) -> bool:
    """Remove a file or folder, or only `patterns` in it; return whether it is gone. failed: gets what can't be removed."""
    if path.is_symlink() or not path.is_dir():
        with suppress(OSError):
            path.unlink()
            return True
        failed.append(path)
        return False
    for inner in [each for pattern in patterns for each in path.glob(pattern)]:
        _remove_written(inner, (), failed)
    if patterns and any(path.iterdir()):
        return False
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        failed.append(path)
        return False
    return True


def _left(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        patterns = WRITTEN.get(path.name, ())
        if patterns and path.is_dir():
            yield from sorted(path.iterdir())
        elif not fnmatch.fnmatchcase(path.name, f"{MARKER}*"):
            yield path
