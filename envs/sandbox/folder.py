"""Temporary folders of sandboxes.

Invariant: the folders of a killed process are removed by the next process that makes one.
"""

import fcntl
import functools
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "offbeat-sandbox-"
MIN_AGE_S = 60.0
"""Of a leftover: a younger folder's owner may not have locked it yet."""


class SandboxFolder:
    """A folder, locked until `remove` or the end of this process."""

    def __init__(self) -> None:
        remove_leftovers(tempfile.gettempdir())
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            self._descriptor: int | None = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            self.path.rmdir()
            raise
        with suppress(OSError):  # NFS locks no folders: there, none is a leftover
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Remove the folder; no effect if it is gone."""
        if self._descriptor is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = None


@functools.cache
def remove_leftovers(parent: str) -> None:
    """Remove the folders of killed processes, once per process."""
    for path in Path(parent).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > MIN_AGE_S:
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)
