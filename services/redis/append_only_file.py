"""Repair of an append-only file that ends within a transaction."""

import logging
import mmap
import os
from pathlib import Path

logger = logging.getLogger(__name__)

APPEND_ONLY_FILES = ("appendonly.aof", "appendonlydir/*.incr.aof")
"""Of Redis 6 and of Redis 7."""
MULTI, EXEC = b"*1\r\n$5\r\nMULTI\r\n", b"*1\r\n$4\r\nEXEC\r\n"


def drop_torn_transactions(folder: Path) -> None:
    """Cut off an incomplete last transaction of the files in `folder`.

    Redis ignores its commands, but may keep its MULTI. Later writes would then be executed by the next start or lost
    (valkey-io/valkey#4342).
    """
    for pattern in APPEND_ONLY_FILES:
        for file in folder.glob(pattern):
            size = file.stat().st_size
            end = _end_of_transactions(file)
            if end < size:
                logger.warning("%s ends within a transaction: its %d bytes are cut off", file, size - end)
                os.truncate(file, end)


def _end_of_transactions(file: Path) -> int:
    """Return the offset of the first MULTI after the last EXEC, or the file's size."""
    if not file.stat().st_size:
        return 0
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        last_exec = content.rfind(EXEC)
        first_open = content.find(MULTI, max(last_exec, 0))
        return len(content) if first_open < 0 else first_open
