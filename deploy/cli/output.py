"""Output of a command that outlives its reader or its terminal."""

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO

from typing_extensions import Buffer


class _Stream(io.FileIO):
    def __init__(self, descriptor: int, on_closed: Callable[[], None]) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._on_closed = on_closed

    def write(self, data: "Buffer", /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self._discard()
            if isinstance(error, BrokenPipeError):
                self._on_closed()
            return memoryview(data).nbytes

    def _discard(self) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno(), inheritable=True)
        os.close(null)


@contextmanager
def discard_unwritable(on_closed: Callable[[], None]) -> Iterator[None]:
    """Discard output that can't be written any more, and escape characters that the encoding lacks, instead of raising.

    on_closed: called when the reader of a pipe has exited. A terminal that is gone sends SIGHUP.
    """
    with redirect_stdout(_wrap(sys.stdout, on_closed)), redirect_stderr(_wrap(sys.stderr, on_closed)):
        yield


def flush(stream: TextIO | None) -> None:
    """Flush a standard stream; Python has None for one that was closed."""
    if stream is not None:
        stream.flush()


def _wrap(stream: TextIO | None, on_closed: Callable[[], None]) -> TextIO:
    if stream is None:
        return Path(os.devnull).open("w", encoding="utf-8")
    stream.flush()
    buffer = io.BufferedWriter(_Stream(stream.fileno(), on_closed))
    return io.TextIOWrapper(buffer, encoding=stream.encoding, errors="backslashreplace", line_buffering=True)
