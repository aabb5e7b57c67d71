"""Copies of checkpoints in a store that fsspec reaches.

A run's folder in the store: `step-000020.000003-000007/` (a checkpoint's files; epoch 3, serial 7),
`manifest-000003-000002.json` (complete checkpoints in order of writing) and `.epoch-000003`.

Invariants: every object is written once, under a name of its writer's epoch. The newest manifest of the highest epoch
is the list; it names a checkpoint after its last file, its `manifest.json`, was stored and verified. If it is
unreadable (a power loss, on file systems), the list is what has all its files. A learner takes a checkpoint off its
list, looks for later epochs, then deletes; a successor announces its epoch before it reads the list: it sees that list,
or nothing is deleted. This needs a store whose reads and listings show completed writes: S3, GCS, Azure, file systems.
"""

# pyright: basic
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from offbeat.services.durable_files import make_folder, sync_file, sync_folder, sync_tree
from offbeat.services.errors import FencedError, RetryableError
from offbeat.trainer.training.checkpoint import (
    LEARNER,
    MANIFEST,
    PREFIX,
    READ_SIZE,
    Checkpoint,
    CheckpointError,
    RemoteCheckpoint,
    fingerprint,
    read_checkpoint,
)
from offbeat.trainer.training.checkpoint_store import SCHEMA
from offbeat.trainer.training.fenced_folder import EPOCH, delete

logger = logging.getLogger(__name__)

LISTS = re.compile(r"manifest-(\d{6,})-(\d{6,})\.json")
CHECKPOINT = re.compile(rf"{PREFIX}(\d{{6,}})\.(\d{{6,}})-(\d{{6,}})")
BUCKETS = ("s3", "s3a", "gs", "gcs", "abfs", "az", "abfss", "oss", "oci", "r2")
"""Protocols without folders."""


class StoreError(RetryableError):
    """Failed access to a store."""


class SourceError(Exception):
    """Local checkpoint that is gone or damaged."""


class RemoteFolder:
    """A run's folder in a store, written by one epoch."""

    def __init__(self, url: str, epoch: int = 0) -> None:
        """epoch: of the writer; 0 reads only. Raises `CheckpointError` for an unusable URL."""
        self.url = url.rstrip("/")
        self._epoch = epoch
        try:
            self._fs, root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{url} can't be used: {error}") from error
        self._root = str(root).rstrip("/")
        self._listed: list[RemoteCheckpoint] = []
        self._superseded: list[str] = []
        """Checkpoints and lists that are no longer in use, and whose files may remain."""
        self._sequence = 0
        self.is_taken = False

    def take_over(self) -> None:
        """Announce the epoch and adopt the earlier ones' checkpoints.

        Raises:
            CheckpointError: a later build wrote the list.
            FencedError: a later epoch has the folder.
            StoreError: no access.
        """
        with self._translating():
            self._make_folder(self._root)
            if self._is_local:
                make_folder(Path(self._root))
            self._fs.pipe_file(f"{self._root}/{EPOCH}{self._epoch:06d}", b"")
            self._check()
            self._write_list(self._newest_list())
            listed = {each.name for each in self._listed}
            for name in self._names():
                match = CHECKPOINT.fullmatch(name)
                if match and name not in listed and int(match[2]) < self._epoch:
                    self._delete(name)
        self.is_taken = True

    @property
    def checkpoints(self) -> Sequence[RemoteCheckpoint]:
        """Return complete checkpoints as of the last change, in order of writing."""
        return tuple(self._listed)

    def read_list(self) -> list[RemoteCheckpoint]:
        """Return the complete checkpoints, in order of writing; raises `StoreError`, or `CheckpointError` for the list of
        a later build.
        """
        with self._translating():
            return self._newest_list()

    def upload(
        self,
        checkpoint: Checkpoint,
        retained: Sequence[str],
        *,
        read_back: bool,
        best: Callable[[], str | None] = lambda: None,
    ) -> RemoteCheckpoint:
        """Store and list a checkpoint; delete those whose `local_name` is not in `retained`.

        best: retained, too; asked once all is stored, as evaluations end meanwhile.
        read_back: compare all bytes, not sizes alone.

        Raises:
            FencedError: a later epoch has the folder.
            SourceError: the local copy is gone or damaged.
            StoreError: a file could not be stored, or differs.
        """
        state, path = checkpoint.state, checkpoint.path
        name = f"{PREFIX}{state.step:06d}.{self._epoch:06d}-{state.serial:06d}"
        new = RemoteCheckpoint(name, state.step, state.lineage, state.serial, self._epoch)
        with self._translating():
            self._check()
            for file, expected in _read_manifest(path).items():
                self._store(path / file, f"{self._root}/{name}/{file}", expected, read_back=read_back)
            manifest = path / MANIFEST
            self._store(manifest, f"{self._root}/{name}/{MANIFEST}", fingerprint(manifest), read_back=True)
            if self._is_local:
                sync_tree(Path(self._root) / name)
            others = [each for each in self._listed if each.name != name]
            names = (*retained, best())
            kept = [each for each in others if each.local_name in names and each.step != state.step]
            self._write_list([*kept, new])
            self._check()
            while self._superseded:
                self._delete(self._superseded[0])
                self._superseded.pop(0)
        return new

    def _store(self, source: Path, target: str, expected: Sequence[int], *, read_back: bool) -> None:
        if not source.is_file() or source.stat().st_size != expected[0]:
            raise SourceError(f"{source} is gone or damaged")
        self._make_folder(target.rpartition("/")[0])
        self._fs.put_file(str(source), target)
        self._fs.invalidate_cache()
        size = self._fs.info(target)["size"]
        if size != expected[0]:
            raise StoreError(f"{target} has {size} bytes instead of {expected[0]}")
        if read_back and self._fingerprint(target) != list(expected):
            if fingerprint(source) != list(expected):
                raise SourceError(f"{source} is damaged")
            raise StoreError(f"{target} differs from {source}")

    def _fingerprint(self, path: str) -> list[int]:
        crc = size = 0
        with self._fs.open(path, "rb") as file:
            while chunk := file.read(READ_SIZE):
                crc, size = zlib.crc32(chunk, crc), size + len(chunk)
        return [size, crc]

    def _write_list(self, checkpoints: list[RemoteCheckpoint]) -> None:
        tree = {"schema": SCHEMA, "epoch": self._epoch, "checkpoints": [asdict(each) for each in checkpoints]}
        path = f"{self._root}/{self._list_name(self._sequence + 1)}"
        self._fs.pipe_file(path, json.dumps(tree, indent=2).encode())
        if self._is_local:  # before what it supersedes is deleted
            sync_file(Path(path))
            sync_folder(Path(self._root))
        self._superseded += [each.name for each in self._listed if each not in checkpoints]
        self._listed, self._sequence = checkpoints, self._sequence + 1
        if self._sequence > 2:  # a reader that has listed the one before can still read it
            self._superseded.append(self._list_name(self._sequence - 2))

    def _list_name(self, sequence: int) -> str:
        return f"manifest-{self._epoch:06d}-{sequence:06d}.json"

    def _newest_list(self) -> list[RemoteCheckpoint]:
        """Return the newest list, or what is complete if it is unreadable.

        Raises:
            CheckpointError: a name that is no checkpoint's; the list of a later build.
        """
        named = [(int(match[1]), int(match[2]), match[0]) for name in self._names() if (match := LISTS.fullmatch(name))]
        for *_, name in sorted(named, reverse=True):
            try:
                return _read_list(name, self._fs.cat_file(f"{self._root}/{name}"))
            except FileNotFoundError:  # replaced since
                continue
            except (ValueError, KeyError, TypeError) as error:  # half written
                logger.warning("%s/%s is unreadable (%s): listing what is complete", self.url, name, error)
                return self._complete()
        return []

    def _complete(self) -> list[RemoteCheckpoint]:
        """Return the checkpoints whose files are there with their sizes, in order of writing."""
        found: list[RemoteCheckpoint] = []
        for name in self._names():
            if match := CHECKPOINT.fullmatch(name):
                folder = f"{self._root}/{name}"
                try:
                    manifest = _parse_manifest(self._fs.cat_file(f"{folder}/{MANIFEST}"))
                    sizes = [self._fs.info(f"{folder}/{file}")["size"] for file in manifest]
                    lineage = str(json.loads(self._fs.cat_file(f"{folder}/{LEARNER}"))["lineage"])
                except (FileNotFoundError, ValueError, KeyError, TypeError, CheckpointError):
                    continue
                if sizes == [expected[0] for expected in manifest.values()]:
                    found.append(RemoteCheckpoint(name, int(match[1]), lineage, int(match[3]), int(match[2])))
        return sorted(found, key=lambda each: (each.serial, each.epoch))

    def _names(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            return [str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []

    def _check(self) -> None:
        newest = self._newest_epoch()
        if newest > self._epoch:
            raise FencedError(
                f"{self.url} belongs to a learner of epoch {newest}; this learner's epoch is {self._epoch}"
            )

    def _is_fenced(self) -> bool:
        """Return whether a later epoch has the folder."""
        try:
            return bool(self._epoch) and self._newest_epoch() > self._epoch
        except Exception:  # no access: the caller reports that
            return False

    def _newest_epoch(self) -> int:
        return max((int(name.removeprefix(EPOCH)) for name in self._names() if name.startswith(EPOCH)), default=0)

    def _delete(self, name: str) -> None:
        folder = f"{self._root}/{name}"
        if self._fs.exists(f"{folder}/{MANIFEST}"):  # first, so that no reader takes the rest for a checkpoint
            self._fs.rm_file(f"{folder}/{MANIFEST}")
        if self._fs.exists(folder):
            self._fs.rm(folder, recursive=True)

    @property
    def _is_local(self) -> bool:
        return isinstance(self._fs, LocalFileSystem)

    def _make_folder(self, path: str) -> None:
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        if not protocols & set(BUCKETS):
            self._fs.makedirs(path, exist_ok=True)

    def fetch(self, name: str, folder: Path) -> Checkpoint:
        """Download and verify a checkpoint into `folder`, unless there.

        Raises:
            CheckpointError: incomplete or damaged.
            StoreError: no access.
        """
        target = folder / (f"{PREFIX}{match[1]}" if (match := CHECKPOINT.fullmatch(name)) else name)
        source = f"{self._root}/{name}"
        with self._translating():
            try:
                manifest = self._fs.cat_file(f"{source}/{MANIFEST}")
            except FileNotFoundError:
                raise CheckpointError(f"{self.url}/{name} is not a complete checkpoint: it has no {MANIFEST}") from None
            if (target / MANIFEST).is_file() and (target / MANIFEST).read_bytes() == manifest:
                return read_checkpoint(target)
            temporary = folder / f".fetching-{name}"
            delete(temporary)
            for file in _parse_manifest(manifest):
                if not (temporary / file).resolve().is_relative_to(temporary.resolve()):
                    raise CheckpointError(f"{self.url}/{name} names a file outside of it: {file}")
                (temporary / file).parent.mkdir(parents=True, exist_ok=True)
                try:
                    self._fs.get_file(f"{source}/{file}", str(temporary / file))
                except FileNotFoundError:
                    raise CheckpointError(f"{self.url}/{name} lacks {file}") from None
            (temporary / MANIFEST).write_bytes(manifest)
        read_checkpoint(temporary)
        for earlier in folder.iterdir():
            if earlier != temporary:
                delete(earlier)
        return read_checkpoint(temporary.rename(target))

    @contextmanager
    def _translating(self) -> Iterator[None]:
        """Translate errors of the stores' libraries, which have no common base."""
        try:
            yield
        except (FencedError, SourceError, CheckpointError):
            raise
        except Exception as error:
            if self._is_fenced():  # a successor removes what was not complete
                self._check()
            if isinstance(error, StoreError):
                raise
            said = " ".join(str(error).split()) or type(error).__name__
            raise StoreError(f"{self.url}: {said}") from error


def fetch_by_url(url: str, folder: Path) -> Checkpoint:
    """Download a checkpoint by its URL, of a run's newest, or of the only run in a folder.

    Raises:
        CheckpointError: no, or several, runs; incomplete or damaged.
        StoreError: no access.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    if name.startswith(PREFIX):
        run = RemoteFolder(parent)
        listed = run.read_list()
        found = [each.name for each in listed if name in (each.name, each.local_name)]
        if listed and not found:
            raise CheckpointError(f"{url} is not complete: {parent} has {', '.join(each.name for each in listed)}")
        return run.fetch(found[-1] if found else name, folder)
    runs = _runs_below(url)
    if len(runs) > 1:
        names = ", ".join(f"{run.url} (step {listed[-1].step})" for run, listed in runs)
        raise CheckpointError(f"{url} has checkpoints of several runs: name one: {names}")
    if not runs:
        raise CheckpointError(f"{url} has no complete checkpoint")
    run, listed = runs[0]
    return run.fetch(listed[-1].name, folder)


def _runs_below(url: str) -> list[tuple[RemoteFolder, list[RemoteCheckpoint]]]:
    top = RemoteFolder(url)
    if listed := top.read_list():
        return [(top, listed)]
    with top._translating():
        below = [RemoteFolder(f"{top.url}/{name}") for name in sorted(top._names()) if not name.startswith(".")]
    return [(run, listed) for run in below if (listed := run.read_list())]


def _read_list(file: str, content: bytes) -> list[RemoteCheckpoint]:
    tree = json.loads(content)
    if int(tree["schema"]) > SCHEMA:
        raise CheckpointError(
            f"{file} has schema {tree['schema']}, this build reads {SCHEMA}: use the build that wrote it"
        )
    return [_read_entry(file, each) for each in tree["checkpoints"]]


def _read_entry(file: str, entry: dict[str, Any]) -> RemoteCheckpoint:
    checkpoint = RemoteCheckpoint(**{each.name: entry[each.name] for each in fields(RemoteCheckpoint)})
    if not CHECKPOINT.fullmatch(checkpoint.name):  # a path, in the store of another
        raise CheckpointError(f"{file} lists {checkpoint.name!r}, which is no checkpoint's name")
    return checkpoint


def _read_manifest(path: Path) -> dict[str, list[int]]:
    try:
        return _parse_manifest((path / MANIFEST).read_bytes())
    except OSError as error:
        raise SourceError(f"{path} is gone: {error}") from error


def _parse_manifest(content: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(content))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"unreadable {MANIFEST}: {error}") from error
