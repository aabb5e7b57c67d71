"""Weight transports' interface, and their files.

Invariants: a version is one safetensors file, stored completely or not at all. Its name (run, folder, version, epoch,
random token) is never reused.
"""

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from blake3 import blake3
from safetensors import SafetensorError

from offbeat.services.durable_files import FULL_DISK
from offbeat.services.errors import StoreUnavailableError, WeightsError
from offbeat.services.messages.types import BaseVersion, Manifest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WHOLE, DIFFERENCE, ADAPTER = ".safetensors", ".difference", ".adapter"
READ_BYTES = 4 << 20
"""Enough for BLAKE3 to use several threads."""
Write = Callable[[Path], tuple[str, int]]
"""Writes a file atomically; returns digest and size."""
AdapterSettings = Mapping[str, object]
"""Contents of PEFT's `adapter_config.json`."""


@dataclass(frozen=True, slots=True)
class Stored:
    location: str
    digest: str
    """Of the file, as `digest_of` returns it."""
    num_bytes: int
    anchor: BaseVersion | None = None
    """Base of a delta; None for a complete version."""


class Transport(Protocol):
    """Synchronous path from the learner to the replicas."""

    name: str

    def copies(self, tensors: "Iterable[tuple[str, Tensor]]") -> "dict[str, Tensor]":
        """Return copies, unchanged until the next version is announced."""
        ...

    def stage(self, version: int, epoch: int, tensors: "dict[str, Tensor]") -> Stored:
        """Store copied tensors as a version; raises `WeightsError`, or `StoreUnavailableError`, after which it may be
        called again.
        """
        ...

    def fetch(self, manifest: Manifest) -> AbstractContextManager[Path]:
        """Yield a local path: a verified safetensors file, an adapter's folder, or, for GPU memory, the description of
        a pull. Raises `WeightsError`.
        """
        ...

    def readable(self, manifest: Manifest) -> bool:
        """Return whether the bytes exist with the right size."""
        ...

    def delete(self, location: str) -> None:
        """Raises `WeightsError` or `StoreUnavailableError`."""
        ...

    def stored(self) -> list["StoredFile"]:
        """Return the run's files, including incomplete ones; raises `WeightsError` or `StoreUnavailableError`."""
        ...

    def close(self) -> None: ...


class FileTransport(Transport, Protocol):
    """Transport of files of any content."""

    def store(self, version: int, epoch: int, suffix: str, write: Write) -> Stored:
        """Store a file that `write` fills; raises as `stage` does."""
        ...


@dataclass(frozen=True, slots=True)
class StoredFile:
    location: str
    modified_at: float
    """Unix time, s."""


def digest_of(stream: BufferedReader, algorithm: str = "blake3") -> str:
    """Return the algorithm, a colon and the hex digest of what is left to read."""
    digest, buffer = new_hash(algorithm), memoryview(bytearray(READ_BYTES))
    while count := stream.readinto(buffer):
        digest.update(buffer[:count])
    return f"{algorithm}:{digest.hexdigest()}"


def algorithm_of(digest: str) -> str:
    return digest.partition(":")[0]


def new_hash(algorithm: str) -> blake3 | hashlib.blake2b:
    """Raises `WeightsError` for an unknown algorithm."""
    match algorithm:
        case "blake3":
            return blake3(max_threads=blake3.AUTO)
        case "blake2b":
            return hashlib.blake2b(digest_size=32)
        case _:
            raise WeightsError(f"weights are verified by blake3, or blake2b (earlier builds), not {algorithm!r}")


def owner_of(run_id: str, output_dir: Path) -> str:
    return f"{run_id}-{hashlib.blake2b(str(output_dir.resolve()).encode(), digest_size=4).hexdigest()}"


def file_name(owner: str, version: int, epoch: int, suffix: str = WHOLE) -> str:
    """Return a new name."""
    return f"offbeat-{owner}-v{version}-e{epoch}-{secrets.token_hex(4)}{suffix}"


def version_and_epoch(location: str) -> tuple[int, int]:
    """Return what a version's file, complete or not, is named after."""
    *_, version, epoch, _ = Path(location).name.split("-")
    return int(version[1:]), int(epoch[1:])


def belongs_to(owner: str, name: str) -> bool:
    return bool(
        re.fullmatch(
            rf"offbeat-{re.escape(owner)}-v\d+-e\d+-[0-9a-f]{{8}}\.(safetensors|difference|adapter)(\.part)?", name
        )
    )


@contextmanager
def open_verified(path: Path, manifest: Manifest) -> Iterator[Path]:
    """Verify a version's file; yield a path to the open file, valid even without its name."""
    try:
        stream = path.open("rb")
    except OSError as error:
        raise WeightsError(f"version {manifest.version} is gone: {error}") from error
    with stream:
        found = digest_of(stream, algorithm_of(manifest.digest))
        if found != manifest.digest:
            raise WeightsError(f"version {manifest.version} is damaged: {found} at {path}, {manifest.digest} announced")
        yield Path(f"/proc/{os.getpid()}/fd/{stream.fileno()}")


def published_dtype(tensor: "Tensor", dtype: str) -> "torch.dtype":
    """Return the type of a published tensor. dtype: `weights.dtype`, of matrices alone: with rounded biases, routers would
    choose other experts.
    """
    import torch

    is_rounded = dtype == "bfloat16" and tensor.is_floating_point() and tensor.dim() > 1
    return torch.bfloat16 if is_rounded else tensor.dtype


class HostCopies:
    """Reused copies in main memory, for one version at a time."""

    def __init__(self, dtype: str = "as_trained") -> None:
        self._dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    def take(self, tensors: "Iterable[tuple[str, Tensor]]") -> "dict[str, Tensor]":
        import torch

        copies: dict[str, Tensor] = {}
        for name, tensor in tensors:
            dtype = published_dtype(tensor, self._dtype)
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != dtype:
                buffer = torch.empty(tensor.shape, dtype=dtype, device="cpu")
            copies[name] = buffer.copy_(tensor.detach())
        self._buffers = copies
        return copies


def write_safetensors(
    path: Path, tensors: "dict[str, Tensor]", metadata: dict[str, str] | None = None
) -> tuple[str, int]:
    """Write a safetensors file atomically; return digest and size."""
    from safetensors.torch import save_file

    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return _write_atomically(path, lambda part: save_file(tensors, part, metadata), num_bytes)


def write_bytes(path: Path, content: bytes | memoryview) -> tuple[str, int]:
    """Write a file atomically; return digest and size."""
    return _write_atomically(path, lambda part: part.write_bytes(content), len(content))


def _write_atomically(path: Path, write: Callable[[Path], object], num_bytes: int = 0) -> tuple[str, int]:
    """num_bytes: which the file system must be able to hold.

    Raises:
        StoreUnavailableError: it is full.
        WeightsError: any other failure.
    """
    # A folder: safetensors writes to a file that it names itself, which stays if it is killed
    folder = path.with_name(path.name + ".part")
    try:
        folder.mkdir(mode=0o700)
        part = folder / path.name
        write(part)
        part.chmod(0o600)
        with part.open("rb") as stream:
            digest = digest_of(stream)
        part.rename(path)
    except (OSError, SafetensorError) as error:
        failure = f"cannot write weights to {path.parent}: {error}"
        if not is_full(error):
            raise WeightsError(failure) from error
        if (total := shutil.disk_usage(path.parent).total) < num_bytes:
            raise WeightsError(f"{failure}: it holds {total} bytes, a version has {num_bytes}") from error
        raise StoreUnavailableError(failure) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return digest, path.stat().st_size


def is_full(error: Exception) -> bool:
    """Return whether a disk, or a quota, was full."""
    if isinstance(error, OSError):
        return error.errno in FULL_DISK
    match = re.search(r"\(os error (\d+)\)", str(error))  # safetensors'
    return match is not None and int(match[1]) in FULL_DISK
