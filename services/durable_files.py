"""Writes that survive a power loss once a call has returned."""

import errno
import json
import os
from contextlib import suppress
from pathlib import Path

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


def make_folder(folder: Path) -> None:
    """Make a folder and sync its entry, even if it exists."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
    with suppress(PermissionError):  # a parent that others own
        sync_folder(folder.parent)


def write_bytes(path: Path, content: bytes) -> None:
    """Write and sync a file, without its folder's entry."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, content: object) -> None:
    write_bytes(path, (json.dumps(content, indent=2) + "\n").encode())


def sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            sync_file(path)
    for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        sync_folder(path)


def sync_file(path: Path) -> None:
    _sync(path, os.O_RDONLY)


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
