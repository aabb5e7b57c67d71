"""Restoration of a backup: a new folder, and the run's keys in a Redis without that run.

The folder appears whole, by a rename; for an external Redis, keys follow in one transaction.
"""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from offbeat.deploy import run_folder
from offbeat.deploy.backup.archive import BackupReader, Contents
from offbeat.deploy.backup.errors import BackupError
from offbeat.deploy.backup.redis_keys import KeysDump, refuse_known_run, restore_keys
from offbeat.deploy.config.loader import dump_yaml, read_run
from offbeat.deploy.redis_address import resolve_url
from offbeat.deploy.run_marker import find_conflict
from offbeat.services.buffer.config import RedisConfig
from offbeat.services.durable_files import sync_folder, sync_tree
from offbeat.services.redis.connection import connect
from offbeat.services.redis.server import EmbeddedRedis

PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Restored:
    contents: Contents
    folder: Path
    num_keys: int
    redis_url: str | None
    """Of an external Redis; None: in the folder."""


def restore(file: Path, folder: Path | None = None, redis_url: str | None = None) -> Restored:
    """Restore a backup. folder: instead of the original one. redis_url: a URL or a file with one.

    Raises:
        BackupError: damaged file, existing folder, or a Redis that has the run.
        MeshError, redis.RedisError: Redis does not answer.
        OSError: the folder can't be written.
    """
    url = resolve_url(redis_url)
    with BackupReader(file) as backup:
        target = (folder or Path(backup.contents.output_dir)).resolve()
        _refuse_folder(target)
        if url is not None:
            with connect(url, patience_s=PATIENCE_S) as redis:
                refuse_known_run(redis, backup.keys.run_id)
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            _write_folder(backup, staging / "run", target, redis_url=url)
        finally:
            shutil.rmtree(staging)
    if url is not None:
        _restore_elsewhere(url, backup.keys, target)
    return Restored(backup.contents, target, len(backup.keys.keys), url)


def _write_folder(backup: BackupReader, staged: Path, target: Path, *, redis_url: str | None) -> None:
    backup.extract(staged)
    settings = _leave_other_redis(staged, target, redis_url)
    if redis_url is None:
        own = staged / run_folder.REDIS
        with EmbeddedRedis(own, settings) as server, connect(server.url) as redis:
            restore_keys(redis, backup.keys, str(target))
    sync_tree(staged)
    staged.rename(target)
    sync_folder(target.parent)


def _restore_elsewhere(url: str, keys: KeysDump, target: Path) -> None:
    try:
        with connect(url, patience_s=PATIENCE_S) as redis:
            (target / run_folder.CLAIM).write_text(run_folder.claim_id(keys.run_id, keys.created_at))
            restore_keys(redis, keys, str(target))
    except BaseException:
        shutil.rmtree(target)
        raise


def _refuse_folder(target: Path) -> None:
    if target.exists():
        raise BackupError(f"{target} exists: name a new folder (--to FOLDER), or move it aside")
    if problem := find_conflict(target):
        raise BackupError(problem.replace("output_dir ", ""))


def _leave_other_redis(folder: Path, target: Path, redis_url: str | None) -> RedisConfig:
    """Remove the URL of another Redis, which may be lost or still have the run, from the configuration."""
    config = read_run(folder / run_folder.CONFIG)
    if config.redis.url in (None, redis_url):
        return config.redis
    own = config.redis.model_copy(update={"url": None})
    config = config.model_copy(update={"output_dir": target, "redis": own})
    run_folder.write_config(folder, dump_yaml(config))
    return own
