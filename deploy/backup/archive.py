"""Backup file: a tar archive with a run's folder and its Redis keys.

`folder/...`: files; `redis.msgpack`: `KeysDump`; `backup.json`: `Contents`, with size and CRC-32 of every file, the
last member. Invariant: the file gets its name once complete and synced, and one process at a time writes it; a damaged
one is refused before anything is restored.
"""

import fcntl
import io
import os
import tarfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec

from offbeat.deploy.backup.errors import BackupError
from offbeat.deploy.backup.redis_keys import KeysDump
from offbeat.services.durable_files import sync_folder

FORMAT = 1
FOLDER, KEYS, CONTENTS = "folder", "redis.msgpack", "backup.json"
READ_SIZE = 1 << 20


class Contents(msgspec.Struct, frozen=True):
    format: int
    offbeat: str
    """Version that wrote it."""
    run_id: str
    output_dir: str
    created_at: float
    """Unix time, s."""
    step: int
    """Of the newest checkpoint; 0 without."""
    files: dict[str, tuple[int, int]]
    """Member -> size, CRC-32."""


class BackupWriter:
    """New archive, readable by its owner; named by `finish`."""

    def __init__(self, path: Path) -> None:
        """Raises `BackupError` if the file exists, or another process writes it."""
        _refuse_existing(path)
        self._path = path
        self._part = path.with_name(f".{path.name}.part")
        self._file = _open_alone(self._part, path)
        self._tar = tarfile.open(fileobj=self._file, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115 -- closed in __exit__
        self._files: dict[str, tuple[int, int]] = {}

    def add(self, name: str, file: BinaryIO, size: int, mode: int = 0o600, modified_at: float = 0.0) -> None:
        """Add the first `size` bytes of a file."""
        member = tarfile.TarInfo(name)
        member.size, member.mode, member.mtime = size, mode, modified_at
        counted = _CountingReader(file)
        self._tar.addfile(member, counted)
        self._files[name] = (size, counted.crc)

    def add_bytes(self, name: str, content: bytes, mode: int = 0o600, modified_at: float = 0.0) -> None:
        self.add(name, io.BytesIO(content), len(content), mode, modified_at)

    def add_link(self, name: str, target: str) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = tarfile.SYMTYPE, target
        self._tar.addfile(member)

    def finish(self, describe: Callable[[dict[str, tuple[int, int]]], Contents]) -> int:
        """Add the contents, sync and name the file; return its size."""
        self.add_bytes(CONTENTS, msgspec.json.format(msgspec.json.encode(describe(self._files)), indent=1))
        self._tar.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        _refuse_existing(self._path)
        self._part.rename(self._path)  # before the lock ends
        self._file.close()
        sync_folder(self._path.resolve().parent)
        return size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._file.closed:
            with suppress(FileNotFoundError):
                self._part.unlink()
            self._file.close()


def _open_alone(part: Path, path: Path) -> BinaryIO:
    """Open and lock the part of a new file, also one that a killed process left; raises `BackupError`."""
    file = os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb")
    if not _try_lock(file) or not _is_named(file, part):
        file.close()
        raise BackupError(f"another backup is being written to {path}: wait for it, or choose another name")
    file.truncate()
    return file


def _try_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, as network drives may be
        return True
    return True


def _is_named(file: BinaryIO, path: Path) -> bool:
    """Return whether a file still has its name, which it loses at the end of a backup."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise BackupError(f"{path} exists: choose another name")


class BackupReader:
    """Verified archive; methods raise `BackupError` for a damaged one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._tar = tarfile.open(path)  # noqa: SIM115 -- closed in __exit__
            self.contents = self._read_contents()
            self.keys = msgspec.msgpack.decode(self._read(KEYS), type=KeysDump)
        except FileNotFoundError as error:
            raise BackupError(f"there is no file {path}") from error
        except (tarfile.TarError, msgspec.MsgspecError, OSError, EOFError) as error:
            raise BackupError(f"{path} is not a whole backup ({error}): use another one") from error

    def extract(self, target: Path) -> None:
        target.mkdir(mode=0o700)
        seen = {KEYS}
        for member in self._tar:
            if member.name.startswith(f"{FOLDER}/"):
                self._extract(member, target)
                seen.add(member.name)
        if missing := [name for name in self.contents.files if name not in seen]:
            raise self._damaged(f"{missing[0]} is missing")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()

    def _extract(self, member: tarfile.TarInfo, target: Path) -> None:
        name = member.name
        member.name = name.removeprefix(f"{FOLDER}/")
        try:
            self._tar.extract(member, target, filter="data")
        except (tarfile.TarError, OSError) as error:
            raise self._damaged(f"{name}: {error}") from error
        finally:
            member.name, written = name, target / member.name
        if member.isfile():
            with written.open("rb") as file:
                self._compare(name, file)

    def _read(self, name: str) -> bytes:
        if name not in self.contents.files or (file := self._tar.extractfile(name)) is None:
            raise self._damaged(f"{name} is missing")
        content = file.read()
        self._compare(name, io.BytesIO(content))
        return content

    def _read_contents(self) -> Contents:
        try:
            file = self._tar.extractfile(CONTENTS)
        except KeyError as error:
            raise BackupError(f"{self._path} is no backup of Offbeat, or was cut: it has no {CONTENTS}") from error
        raw = file.read() if file else b""
        version = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).get("format", b"0")
        if bytes(version) != str(FORMAT).encode():
            raise BackupError(
                f"{self._path} has format {bytes(version).decode()}, this version reads {FORMAT}: use the version of "
                "Offbeat that wrote it"
            )
        return msgspec.json.decode(raw, type=Contents)

    def _compare(self, name: str, file: BinaryIO) -> None:
        reader = _CountingReader(file)
        size = 0
        while part := reader.read(READ_SIZE):
            size += len(part)
        if self.contents.files.get(name) != (size, reader.crc):
            raise self._damaged(f"{name} differs from its checksum")

    def _damaged(self, what: str) -> BackupError:
        return BackupError(f"{self._path} is damaged: {what}; use another backup")


class _CountingReader:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.crc = 0

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.crc = zlib.crc32(data, self.crc)
        return data
