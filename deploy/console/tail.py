import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

logger = logging.getLogger(__name__)

DECODER = msgspec.json.Decoder()
CHUNK_BYTES = 1 << 17
"""Decoding one holds the interpreter lock: other threads wait."""


class JsonLinesTail:
    """Position in a growing file; a replaced or shortened one is read from its start."""

    def __init__(self, path: Path, newest_bytes: int = 0) -> None:
        """newest_bytes: of a larger file, its end of that size is read; 0: all of it."""
        self._path = path
        self._newest_bytes = newest_bytes
        self._inode = 0
        self._offset = 0
        self.num_unread_bytes = 0
        """Left by the last `read`, whose time was up."""
        self.num_skipped_bytes = 0
        """Before the first row, of a file above `newest_bytes`."""

    def restarted(self) -> bool:
        """Return whether the next `read` starts at the file's first line."""
        try:
            status = self._path.stat()
        except OSError:
            self._offset = 0
            return True
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode, self._offset = status.st_ino, 0
        return self._offset == 0

    def read(self, for_s: float = math.inf) -> Iterator[dict[str, Any]]:
        """Yield new complete rows, except malformed ones, of the chunks that begin within `for_s`."""
        self.num_unread_bytes = 0
        deadline = time.monotonic() + for_s
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            if self._offset == 0:
                self._offset = self.num_skipped_bytes = self._find_start(file)
            file.seek(self._offset)
            while lines := file.read(CHUNK_BYTES):
                lines += file.readline()  # to a line's end
                complete = lines[: lines.rfind(b"\n") + 1]
                self._offset += len(complete)
                yield from _rows(complete)
                if len(complete) < len(lines):
                    return  # the next call begins with the row that is incomplete
                if time.monotonic() > deadline:
                    self.num_unread_bytes = max(os.fstat(file.fileno()).st_size - self._offset, 0)
                    return

    def _find_start(self, file: BinaryIO) -> int:
        size = os.fstat(file.fileno()).st_size
        if not self._newest_bytes or size <= self._newest_bytes:
            return 0
        file.seek(size - self._newest_bytes)
        file.readline()
        return file.tell()


def _rows(lines: bytes) -> list[dict[str, Any]]:
    try:
        rows = DECODER.decode_lines(lines)
    except (msgspec.DecodeError, UnicodeDecodeError):  # some line is malformed
        rows = [row for line in lines.splitlines() for row in _row(line)]
    return [row for row in rows if isinstance(row, dict)]


def _row(line: bytes) -> list[Any]:
    try:
        return [DECODER.decode(line)]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
