"""Weight versions on an fsspec filesystem; replicas read a local copy."""

# pyright: basic
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec

from offbeat.services.errors import MeshError, StoreUnavailableError, WeightsError
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

PERMANENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Errors of a wrong URL, a missing bucket or missing rights."""
CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "DefaultCredentialsError",
    "ClientAuthenticationError",
}
"""Names of the errors of botocore, google-auth and azure-core for missing credentials, which are no `PermissionError`."""


class FilesystemTransport:
    name = "fs"

    def __init__(self, owner: str, url: str, *, dtype: str = "as_trained") -> None:
        """Raises WeightsError if the URL can't be used, StoreUnavailableError if its store can't be reached now."""
        failure = f"weights.url {url!r} cannot be used"
        try:
            with _translating(failure):
                self._fs, root = fsspec.core.url_to_fs(url)
        except StoreUnavailableError as error:
            if isinstance(error.__cause__, ImportError | ValueError):
                raise WeightsError(f"{failure}: {error.__cause__}") from error
            raise
        self._owner = owner
        self._root = str(root).rstrip("/")
        self._host = HostCopies(dtype)

    def copies(self, tensors: "Iterable[tuple[str, Tensor]]") -> "dict[str, Tensor]":
        return self._host.take(tensors)

    def stage(self, version: int, epoch: int, tensors: "dict[str, Tensor]") -> Stored:
        return self.store(version, epoch, WHOLE, lambda path: write_safetensors(path, tensors))

    def store(self, version: int, epoch: int, suffix: str, write: Write) -> Stored:
        name = file_name(self._owner, version, epoch, suffix)
        location = f"{self._root}/{name}"
        with _temporary_folder("offbeat-stage-", StoreUnavailableError) as folder:
            local = folder / name
            digest, num_bytes = write(local)
            with _translating(f"cannot write weights to {self._root}"):
                self._fs.makedirs(self._root, exist_ok=True)
                self._put(local, location)
        return Stored(location, digest, num_bytes)

    @contextmanager
    def fetch(self, manifest: Manifest) -> Iterator[Path]:
        location = self._own(manifest.location)
        with _temporary_folder("offbeat-fetch-", WeightsError) as folder:
            local = folder / "weights.safetensors"
            with _translating(f"version {manifest.version} is gone or can't be reached", WeightsError):
                self._fs.get_file(location, str(local))
            with open_verified(local, manifest) as path:
                yield path

    def readable(self, manifest: Manifest) -> bool:
        self._fs.invalidate_cache()
        try:
            with _translating("", WeightsError):
                return self._fs.size(self._own(manifest.location)) == manifest.num_bytes
        except WeightsError:
            return False

    def delete(self, location: str) -> None:
        with _translating(f"cannot remove {location}"), suppress(FileNotFoundError):
            self._fs.rm_file(self._own(location))

    def stored(self) -> list[StoredFile]:
        self._fs.invalidate_cache()
        entries: list[dict[str, Any]] = []
        with _translating(f"cannot list {self._root}"), suppress(FileNotFoundError):
            entries = self._fs.ls(self._root, detail=True)
        return [
            StoredFile(entry["name"], _modified_at(entry))
            for entry in entries
            if belongs_to(self._owner, Path(entry["name"]).name)
        ]

    def close(self) -> None:
        """Do nothing."""

    def _put(self, local: Path, location: str) -> None:
        part = location + ".part"
        try:
            self._fs.put_file(str(local), part)
            self._fs.mv(part, location)
        except OSError:  # of a full disk, which half a version would keep full
            with suppress(Exception):
                self._fs.rm_file(part)
            raise

    def _own(self, location: str) -> str:
        folder, _, name = location.rpartition("/")
        if folder != self._root or not belongs_to(self._owner, name):
            raise WeightsError(f"{location} is no weight file of run {self._owner!r} in {self._root}")
        return location


@contextmanager
def _temporary_folder(prefix: str, transient: type[MeshError]) -> Iterator[Path]:
    """Yield a new folder; raises `transient` if the disk is full."""
    with _translating("cannot make a temporary folder", transient):
        folder = tempfile.TemporaryDirectory(prefix=prefix)
    with folder as path:
        yield Path(path)


@contextmanager
def _translating(failure: str, transient: type[MeshError] = StoreUnavailableError) -> Iterator[None]:
    """Raise `WeightsError` for a store's permanent error, and `transient` for any other."""
    try:
        yield
    except MeshError:
        raise
    except PERMANENT as error:
        raise WeightsError(f"{failure}: {error}") from error
    except Exception as error:  # of the store's own library, which may be no OSError
        if any(each.__name__ in CREDENTIALS for each in type(error).__mro__):
            raise WeightsError(f"{failure}: {type(error).__name__}: {error}") from error
        raise transient(f"{failure}: {type(error).__name__}: {error}") from error


def _modified_at(entry: dict[str, Any]) -> float:
    """Return the Unix time of a listing's entry, now if unknown."""
    value = next((entry[name] for name in ("mtime", "LastModified", "created") if entry.get(name) is not None), None)
    if isinstance(value, datetime):
        return value.timestamp()
    return float(value) if isinstance(value, int | float) else datetime.now().timestamp()
