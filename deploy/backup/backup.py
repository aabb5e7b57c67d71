"""Backup of a run, even an active one, to a file.

Order: Redis at one moment, then the folder. A checkpoint is durable before its groups leave Redis, so the files hold
whatever the dump lacks; the ledger of events is cut to the dump's moment; a journal with later groups is read again,
after another dump.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from redis import Redis

from offbeat import __version__
from offbeat.deploy import run_folder
from offbeat.deploy.backup.archive import FOLDER, FORMAT, KEYS, BackupWriter, Contents
from offbeat.deploy.backup.errors import BackupError
from offbeat.deploy.backup.folder_files import FolderFiles, OpenedFile, open_files
from offbeat.deploy.backup.ledger_cut import complete_lines, cut_events, newest_group
from offbeat.deploy.backup.redis_keys import KeysDump, dump_keys
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.redis_address import find_url, has_other_run, resolve_url
from offbeat.services.buffer.group_ledger import LEDGER_FILE
from offbeat.services.redis.connection import connect
from offbeat.services.redis.server import EmbeddedRedis
from offbeat.trainer.learner.step_ledger import STEPS_FILE
from offbeat.trainer.training.checkpoint import PREFIX

PATIENCE_S = 5.0
MAX_ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class BackedUp:
    num_keys: int
    num_files: int
    size: int
    """Bytes."""
    step: int


def back_up(folder: Path, config: RunConfig, target: Path, redis_url: str | None = None) -> BackedUp:
    """Write a backup. redis_url: a URL or a file with one, instead of the run's.

    Raises:
        BackupError: no Redis, or the run is not in it.
        MeshError, redis.RedisError: Redis does not answer.
        OSError: a file can't be read or written.
    """
    with BackupWriter(target) as writer, open_redis(folder, config, redis_url) as redis:
        with _consistent(folder, redis, config.exp_name) as (dump, found):
            writer.add_bytes(KEYS, msgspec.msgpack.encode(dump))
            for path, opened in found.files.items():
                _add(writer, path, opened, dump)
            for path, link in found.links.items():
                writer.add_link(f"{FOLDER}/{path}", link)
            step = _newest_step(found)
        size = writer.finish(
            lambda files: Contents(FORMAT, __version__, config.exp_name, str(folder), time.time(), step, files)
        )
    return BackedUp(len(dump.keys), len(found.files), size, step)


@contextmanager
def open_redis(folder: Path, config: RunConfig, given: str | None = None) -> Iterator[Redis]:
    """Connect to a run's Redis, started on the folder if the run has ended; raises `BackupError`."""
    url = resolve_url(given) or config.redis.url or find_url(folder)
    if url is not None:
        with connect(url, patience_s=PATIENCE_S) as redis:
            if has_other_run(redis, config.exp_name, folder):
                raise BackupError(
                    f"this Redis has another run {config.exp_name!r} than that of {folder}: copy the folder"
                )
            yield redis
        return
    if not (folder / run_folder.REDIS).is_dir():
        raise BackupError(
            f"{folder} has no {run_folder.REDIS}/: name the Redis of its mesh (--redis URL), or copy the folder; "
            "a run resumes from its checkpoints without Redis, too"
        )
    with EmbeddedRedis(folder / run_folder.REDIS, config.redis) as server, connect(server.url) as redis:
        yield redis


@contextmanager
def _consistent(folder: Path, redis: Redis, run_id: str) -> Iterator[tuple[KeysDump, FolderFiles]]:
    """Yield a dump, and the files of then or later."""
    attempts = 0
    while True:
        dump = dump_keys(redis, run_id)
        with open_files(folder) as found:
            newest = newest_group(_content(found.files[STEPS_FILE])) if STEPS_FILE in found.files else -1
            if newest < dump.next_number:
                yield dump, found
                return
        attempts += 1
        if attempts == MAX_ATTEMPTS:
            raise BackupError(
                f"{folder / STEPS_FILE} has group {newest}, but its Redis has given out only {dump.next_number}: pause "
                "the run (`offbeat runs pause`); if its Redis has lost data, resume it first, which reconciles both"
            )


def _add(writer: BackupWriter, path: Path, opened: OpenedFile, dump: KeysDump) -> None:
    name = f"{FOLDER}/{path}"
    if path.suffix == ".jsonl":
        content = _content(opened)
        content = cut_events(content, dump.newest_event) if path == LEDGER_FILE else complete_lines(content)
        writer.add_bytes(name, content, opened.mode, opened.modified_at)
    else:
        writer.add(name, opened.file, opened.size, opened.mode, opened.modified_at)


def _content(opened: OpenedFile) -> bytes:
    opened.file.seek(0)
    return opened.file.read(opened.size)


def _newest_step(found: FolderFiles) -> int:
    names = [path.parts[1] for path in found.files if path.parts[0] == "checkpoints" and len(path.parts) > 2]
    steps = [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]
    return max((int(step) for step in steps if step.isdigit()), default=0)
