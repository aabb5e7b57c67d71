"""Values that are read from files, and read again once a file is replaced."""

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


class CachedFile(Generic[T]):
    """Result of `read`, kept while the file at `path` stays as it is; thread-safe."""

    def __init__(self, path: Path, read: Callable[[], T]) -> None:
        self._path = path
        self._read = read
        self._cached: tuple[tuple[int, ...], T] | None = None

    def get(self) -> T:
        """Raises what `read` does, which is then called again."""
        state = self._state()
        cached = self._cached
        if cached is None or cached[0] != state:
            self._cached = cached = state, self._read()
        return cached[1]

    def _state(self) -> tuple[int, ...]:
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return status.st_ino, status.st_mtime_ns, status.st_size
