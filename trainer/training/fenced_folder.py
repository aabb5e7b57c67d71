"""Folder that only the holder of the newest lease changes.

Each epoch makes its changes through a folder of its own, `.epoch-N`: a file is written there and renamed into place, or
removed by a rename into it. A successor makes its `.epoch-M`, then removes earlier ones, whose owners' renames then
fail.

Invariants: no check precedes a change, so a process may be stopped between any two system calls and wake at any time;
there are no locks. They need renames that are atomic and fail if a folder was removed: local file systems and NFS.
"""

import itertools
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from offbeat.services.durable_files import make_folder, sync_folder, write_bytes, write_json
from offbeat.services.errors import FencedError

EPOCH = ".epoch-"
REMOVED = "removed-"


class FencedFolder:
    def __init__(self, path: Path, epoch: int) -> None:
        """Take over or make the folder.

        Raises:
            FencedError: a learner of this or a later epoch has it.
        """
        self.path = path
        self.epoch = epoch
        self._own = path / f"{EPOCH}{epoch:06d}"
        self._sequence = itertools.count()
        make_folder(path)
        try:
            self._own.mkdir()
        except FileExistsError:
            raise self._fenced() from None
        for number, folder in epoch_folders(path):
            if number < epoch:
                with suppress(FileNotFoundError):  # a later epoch has taken it, or this one
                    folder.rename(self._own / folder.name)
        # Made before this look: a later epoch that is not seen here finds this one, and removes it
        if newest_epoch_folder(path) > epoch:
            shutil.rmtree(self._own, ignore_errors=True)
            raise self._fenced()

    def taken_over(self) -> list[Path]:
        return list(staged_entries(self._own))

    def discard(self, *prefixes: str) -> None:
        """Remove entries of the epoch's folder."""
        for path in entries(self._own):
            if path.name.startswith(prefixes):
                delete(path)

    def check(self) -> None:
        """Raise `FencedError` if a later epoch has the folder."""
        try:
            held = self._own.is_dir()
        except OSError:  # a stale handle of NFS
            held = False
        if not held:
            raise self._fenced()

    def stage(self, source: Path, name: str) -> None:
        """Rename into the epoch's folder; raises `FencedError`."""
        with self._fencing():
            delete(self._own / name)
            source.rename(self._own / name)
            sync_folder(self._own)

    def publish(self, staged: str | Path, name: str) -> Path:
        """Rename a staged entry into the folder; a file replaces an earlier one.

        Raises:
            FencedError: a later epoch has the folder.
        """
        target = self.path / name
        with self._fencing():
            (self._own / staged).replace(target)
            sync_folder(self.path)
        return target

    def write(self, name: str, content: bytes) -> None:
        """Write and publish; raises `FencedError`."""
        with self._fencing():
            write_bytes(self._own / name, content)
        self.publish(name, name)

    def write_json(self, name: str, content: object) -> None:
        """Write and publish JSON; raises `FencedError`."""
        with self._fencing():
            write_json(self._own / name, content)
        self.publish(name, name)

    def link(self, name: str, target: str) -> None:
        """Publish a symbolic link; raises `FencedError`."""
        with self._fencing():
            (self._own / name).unlink(missing_ok=True)
            (self._own / name).symlink_to(target)
        self.publish(name, name)

    def take_away(self, name: str) -> Path:
        """Move an entry into the epoch's folder; return its new path. Raises `FencedError`."""
        path = self._own / f"{REMOVED}{next(self._sequence)}-{name}"
        with self._fencing():
            (self.path / name).rename(path)
        return path

    def remove(self, name: str) -> None:
        """Remove an entry, if present; raises `FencedError`."""
        if (self.path / name).exists():
            delete(self.take_away(name))

    @contextmanager
    def _fencing(self) -> Iterator[None]:
        """Translate failures after the removal of the epoch's folder."""
        try:
            yield
        except OSError:
            self.check()
            raise

    def _fenced(self) -> FencedError:
        newest = max(newest_epoch_folder(self.path), self.epoch)
        return FencedError(f"{self.path} belongs to a learner of epoch {newest}; this learner's epoch is {self.epoch}")


def delete(path: Path) -> None:
    """Remove as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def entries(folder: Path) -> list[Path]:
    """Return a folder's entries; none if removed."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []


def staged_entries(folder: Path) -> Iterator[Path]:
    for epoch_folder in entries(folder):
        if epoch_folder.name.startswith(EPOCH):
            yield from (path for path in entries(epoch_folder) if not path.name.startswith((EPOCH, REMOVED)))
            yield from staged_entries(epoch_folder)


def epoch_folders(folder: Path) -> list[tuple[int, Path]]:
    """Return the epochs with a folder, ascending."""
    found = ((re.fullmatch(rf"{re.escape(EPOCH)}(\d+)", path.name), path) for path in entries(folder))
    return sorted((int(match[1]), path) for match, path in found if match)


def newest_epoch_folder(folder: Path) -> int:
    """Return the newest epoch with a folder; 0 for none."""
    return max((number for number, _ in epoch_folders(folder)), default=0)
