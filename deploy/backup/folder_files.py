"""Files of a run's folder for a backup, opened at one moment.

Open files stay readable when their checkpoint is removed, and keep their length.
"""

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from offbeat.deploy import run_folder
from offbeat.deploy.backup.errors import BackupError
from offbeat.deploy.run_marker import MARKER
from offbeat.services.buffer.group_ledger import LEDGER_FILE

LEFT_OUT = (
    *("logs", "weights", "restored", ".claim", ".config.yaml.part", ".report.json.part", ".start-*"),
    *("history.msgpack", ".history.msgpack.part"),
    run_folder.REDIS,
    run_folder.ENDPOINTS,
    run_folder.LOCK,
)
"""Entries that a run makes anew, or that belong to its processes."""
KEPT = (*(name for name in run_folder.WRITTEN if name not in LEFT_OUT), MARKER)
UNFINISHED = (".writing-", ".epoch-")
MAX_SCANS = 20


@dataclass(frozen=True, slots=True)
class OpenedFile:
    file: BinaryIO
    size: int
    mode: int
    modified_at: float


@dataclass(frozen=True, slots=True)
class FolderFiles:
    files: dict[Path, OpenedFile] = field(default_factory=dict[Path, OpenedFile])
    """Path relative to the folder -> open file."""
    links: dict[Path, str] = field(default_factory=dict[Path, str])


@contextmanager
def open_files(folder: Path) -> Iterator[FolderFiles]:
    """Open the run's files; raises `BackupError` if checkpoints change too fast."""
    _raise_file_limit()
    for _ in range(MAX_SCANS):
        with ExitStack() as stack:
            try:
                found = _scan(folder, stack)
            except FileNotFoundError:  # a checkpoint was removed meanwhile
                continue
            yield found
            return
    raise BackupError(f"{folder} changes too fast to be read: pause the run first (`offbeat runs pause`)")


def _scan(folder: Path, stack: ExitStack) -> FolderFiles:
    found = FolderFiles()
    # The ledgers last: they hold at least what the checkpoints hold
    paths = sorted(_list(folder), key=lambda path: (LEDGER_FILE.parent in path.parents, path))
    for path in paths:
        whole = folder / path
        if whole.is_symlink():
            found.links[path] = os.readlink(whole)
            continue
        file = stack.enter_context(whole.open("rb"))
        status = os.fstat(file.fileno())
        found.files[path] = OpenedFile(file, status.st_size, status.st_mode & 0o777, status.st_mtime)
    return found


def _list(folder: Path) -> Iterator[Path]:
    """Yield relative files, and links within the folder."""
    for name in KEPT:
        for entry in folder.glob(name):
            yield from (path.relative_to(folder) for path in _walk(entry))


def _walk(entry: Path) -> Iterator[Path]:
    if entry.is_symlink():
        if not os.path.isabs(os.readlink(entry)):  # others lead to models outside, and are made anew
            yield entry
    elif entry.is_dir():
        for inner in sorted(entry.iterdir()):
            if not inner.name.startswith(UNFINISHED):
                yield from _walk(inner)
    else:
        yield entry


def _raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
