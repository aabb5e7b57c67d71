"""What a power cut leaves of a folder."""

import os
import random
import shutil
import stat
from pathlib import Path

Entries = dict[str, int]
"""Name -> inode."""


class Disk:
    """Contents and entries of a folder as of their last fsync.

    Every inode that was synced is held open, so that its number is not given to another file.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._held: list[int] = []
        self._modes: dict[int, int] = {}
        self._links: dict[int, str] = {}
        self._contents: dict[int, bytes] = {}
        self._entries: dict[int, Entries] = {}
        self._sync_all()

    def close(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()

    def sync(self, descriptor: int) -> None:
        """Note an fsync."""
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_relative_to(self._root):
            self._sync(path)

    def cut(self, walk: random.Random) -> None:
        """Lose power, under one of two file systems.

        One keeps what was synced, and nothing else. The other keeps all entries, as a journal does, but of a file's unsynced
        content only a part.
        """
        kept = self._root.with_name(f"{self._root.name}.kept")
        kept.mkdir()
        if walk.random() < 0.5:
            self._restore(self._root.stat().st_ino, kept)
        else:
            self._copy_torn(self._root, kept, walk)
        shutil.rmtree(self._root)
        kept.rename(self._root)
        self.close()
        self._sync_all()

    def _sync_all(self) -> None:
        self._contents, self._entries = {}, {}
        for path in (self._root, *self._root.rglob("*")):
            if not path.is_symlink():
                self._sync(path)

    def _sync(self, path: Path) -> None:
        inode = self._hold(path)
        if not path.is_dir():
            self._contents[inode] = path.read_bytes()
            return
        self._entries[inode] = {each.name: self._hold(each) for each in path.iterdir()}

    def _hold(self, path: Path) -> int:
        status = path.lstat()
        if path.is_symlink():
            self._links[status.st_ino] = str(path.readlink())
        self._held.append(os.open(path, os.O_PATH | os.O_NOFOLLOW))
        self._modes[status.st_ino] = status.st_mode
        return status.st_ino

    def _restore(self, inode: int, target: Path) -> None:
        for name, child in self._entries.get(inode, {}).items():
            path = target / name
            if stat.S_ISDIR(self._modes[child]):
                path.mkdir()
                self._restore(child, path)
            elif stat.S_ISLNK(self._modes[child]):
                path.symlink_to(self._links[child])
            else:
                path.write_bytes(self._contents.get(child, b""))

    def _copy_torn(self, source: Path, target: Path, walk: random.Random) -> None:
        for path in sorted(source.iterdir()):
            copy = target / path.name
            if path.is_symlink():
                copy.symlink_to(path.readlink())
            elif path.is_dir():
                copy.mkdir()
                self._copy_torn(path, copy, walk)
            else:
                content, synced = path.read_bytes(), self._contents.get(path.stat().st_ino, b"")
                least = len(synced) if content.startswith(synced) else 0
                copy.write_bytes(content if content == synced else content[: walk.randint(least, len(content))])
