"""JSON Lines files appended to by successive processes.

Each append is one write. The next process removes a partial last line; readers skip invalid ones.
"""

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from offbeat.services.durable_files import make_folder, sync_folder

TAIL_BYTES = 1 << 16


class LinesFile:
    """Append-only file, created with its folder durably."""

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        _cut_broken_end(path)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        sync_folder(path.parent)
        self._cut = False

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows. Raises OSError if not all were written; repeatable."""
        text = "".join(json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n" for row in rows)
        data = ("\n" if self._cut else "").encode() + text.encode()
        self._cut = True
        if os.write(self._descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._cut = False

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def read_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield rows, None for invalid ones; nothing without a file."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield _row(line)


def last_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows in the last 64 KiB, or at least one."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        tail = TAIL_BYTES
        while True:
            file.seek(max(0, size - tail))
            rows = [row for line in file.read().splitlines() if (row := _row(line)) is not None]
            if rows or tail >= size:
                return rows
            tail *= 2


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _cut_broken_end(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = size = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - TAIL_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            end = start if newline < 0 else start + newline + 1
            if newline >= 0:
                break
        if end < size:
            file.truncate(end)
