"""JSON Lines files that successive processes append to.

Invariant: lines are written in one call each; a partial last line of a process that died is removed by the next one,
and one that a full disk cut off stays on a line of its own that readers skip.
"""

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

TAIL_BYTES = 1 << 16


class LinesFile:
    """Appends to a file, which is made with its folder where there is none."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_broken_end(path)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._cut = False

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows. Raises OSError if not all could be written; the same call may be made again."""
        text = "".join(json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n" for row in rows)
        data = ("\n" if self._cut else "").encode() + text.encode()
        self._cut = True
        if os.write(self._descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._cut = False

    def sync(self) -> None:
        """Sync the file to disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Write no more."""
        os.close(self._descriptor)


def read_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of a file in order, None for an invalid line; nothing if there is no file."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield _row(line)


def last_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows in the last 64 KiB of a file."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        return [row for line in file.read().splitlines() if (row := _row(line)) is not None]


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
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        tail = file.read()
        if tail and not tail.endswith(b"\n"):
            file.truncate(size - (len(tail) - tail.rfind(b"\n") - 1))
