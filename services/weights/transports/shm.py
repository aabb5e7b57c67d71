"""Weight versions in `/dev/shm`, mapped by learner and replicas of one host."""

import shutil
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.services.errors import WeightsError
from offbeat.services.messages.types import Manifest
from offbeat.services.weights.transports.base import (
    WHOLE,
    HostCopies,
    Stored,
    StoredFile,
    Write,
    belongs_to,
    file_name,
    open_verified,
    write_safetensors,
)

if TYPE_CHECKING:
    from torch import Tensor


class SharedMemoryTransport:
    name = "shm"

    def __init__(self, owner: str, folder: Path = Path("/dev/shm"), *, dtype: str = "as_trained") -> None:
        if not folder.is_dir():
            raise WeightsError(f"transport `shm` needs {folder}; use `weights.transport=fs` here")
        self._owner = owner
        self._folder = folder
        self._host = HostCopies(dtype)

    def copies(self, tensors: "Iterable[tuple[str, Tensor]]") -> "dict[str, Tensor]":
        return self._host.take(tensors)

    def stage(self, version: int, epoch: int, tensors: "dict[str, Tensor]") -> Stored:
        return self.store(version, epoch, WHOLE, lambda path: write_safetensors(path, tensors))

    def store(self, version: int, epoch: int, suffix: str, write: Write) -> Stored:
        path = self._folder / file_name(self._owner, version, epoch, suffix)
        digest, num_bytes = write(path)
        return Stored(str(path), digest, num_bytes)

    def fetch(self, manifest: Manifest) -> AbstractContextManager[Path]:
        return open_verified(self._own(manifest.location), manifest)

    def readable(self, manifest: Manifest) -> bool:
        try:
            return self._own(manifest.location).stat().st_size == manifest.num_bytes
        except (OSError, WeightsError):
            return False

    def delete(self, location: str) -> None:
        path = self._own(location)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def stored(self) -> list[StoredFile]:
        found: list[StoredFile] = []
        for path in self._folder.iterdir():
            if belongs_to(self._owner, path.name):
                try:
                    inside = path.iterdir() if path.is_dir() else ()
                    found.append(StoredFile(str(path), max(each.stat().st_mtime for each in (path, *inside))))
                except FileNotFoundError:  # deleted while we looked
                    continue
        return found

    def close(self) -> None:
        """Do nothing."""

    def _own(self, location: str) -> Path:
        path = Path(location)
        if path.parent != self._folder or not belongs_to(self._owner, path.name):
            raise WeightsError(f"{location} is no weight file of run {self._owner!r} in {self._folder}")
        return path
