"""Copies, expiry and deletion of checkpoints.

Invariants: an expired checkpoint is not found, and a deleted one leaves no files, whichever process dies when: the
learner removes them, once it can repeat no command that writes or reads them.
"""

import asyncio
import logging
import os
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path

import msgspec
from redis import exceptions as redis_errors

from offbeat.services.durable_files import make_folder, sync_folder, sync_tree
from offbeat.services.tinker.errors import NotFoundError, TinkerError
from offbeat.services.tinker.owned_records import OwnedRecords
from offbeat.services.tinker.records import SEGMENTS, CheckpointRecord, ModelRecord, Session, tinker_path
from offbeat.services.tinker.refusals import check_ttl
from offbeat.services.tinker.schemas import CopyWeightsBody
from offbeat.services.tinker.store import TinkerStore

logger = logging.getLogger(__name__)

MAX_INTERVAL_S = 5.0
"""Greatest time between an expiry and the deletion."""
COPIES = uuid.UUID("5ad5c7a3-59d5-4b5a-8f0c-6f1d0a1f9a57")
"""Namespace of the ids of copies' sessions."""


class Checkpoints:
    def __init__(self, store: TinkerStore, records: OwnedRecords, max_saved_gib: float) -> None:
        self._store = store
        self._records = records
        self._max_saved_gib = max_saved_gib

    async def complain_of_size(self, owner: str) -> str | None:
        """Return why the owner may save no further checkpoint, if so."""
        saved = await self._store.saved_bytes(owner) / (1 << 30)
        if saved < self._max_saved_gib:
            return None
        advice = "delete some, by RestClient.delete_checkpoint"
        return f"checkpoints of this key take {saved:.3g} GiB (tinker.max_saved_gib): {advice}"

    async def set_ttl(self, owner: str, path: str, ttl_seconds: int | None) -> None:
        """Let a checkpoint expire, or never; raises NotFoundError."""
        check_ttl(ttl_seconds)
        await self._records.checkpoint(owner, path)
        expires_at = None if ttl_seconds is None else time.time() + ttl_seconds

        def change(record: CheckpointRecord) -> CheckpointRecord:
            return msgspec.structs.replace(record, expires_at=expires_at)

        if await self._store.change_checkpoint(owner, path, change) is None:
            raise NotFoundError(f"there is no checkpoint {path}")

    async def delete(self, owner: str, path: str) -> None:
        """Delete a checkpoint; commands that were accepted before still load it. Raises NotFoundError."""
        await self._records.checkpoint(owner, path)
        if await self._store.change_checkpoint(owner, path, lambda _: None) is None:
            raise NotFoundError(f"there is no checkpoint {path}")

    async def copy(self, owner: str, body: CopyWeightsBody, idempotency_key: str) -> str:
        """Copy a checkpoint to a model that takes no commands; return its path. A call with the same key copies once.

        Raises:
            NotFoundError: there is no such checkpoint.
            TinkerError: the owner's checkpoints are too large.
        """
        check_ttl(body.ttl_seconds)
        source = await self._records.checkpoint(owner, body.source_path)
        seed = f"{owner}:{idempotency_key or uuid.uuid4()}"
        session_id = str(uuid.uuid5(COPIES, seed))
        model_id = f"{session_id}:train:0"
        path = tinker_path(model_id, source.kind, body.source_path.rpartition("/")[2])
        if await self._store.find(self._store.keys.checkpoints, path, CheckpointRecord) is not None:
            return path
        if complaint := await self.complain_of_size(owner):
            raise TinkerError(complaint)
        folder = Path(source.adapter.folder)
        copied = folder.parents[2] / model_id / SEGMENTS[source.kind] / folder.name
        try:
            await asyncio.to_thread(_link_tree, folder, copied)
        except FileNotFoundError:
            raise NotFoundError(f"there is no checkpoint {body.source_path}") from None
        now = time.time()
        record = msgspec.structs.replace(
            source,
            model_id=model_id,
            created_at=now,
            adapter=msgspec.structs.replace(source.adapter, folder=str(copied)),
            expires_at=None if body.ttl_seconds is None else now + body.ttl_seconds,
        )
        model = ModelRecord(owner=owner, session_id=session_id, created_at=now, lora=source.lora)
        session = Session(owner=owner, created_at=now, is_finished=True)
        await self._store.add_copy(session, model_id, model, path, record)
        return path

    async def delete_expired(self) -> float:
        """Delete what has expired; return the seconds until the next expiry."""
        now = time.time()
        owners = {model_id: each.owner for model_id, each in (await self._store.all_models()).items()}
        expiries = await self._store.expiries()
        for path, record in expiries.items():
            if record.is_expired(now):
                await self._store.change_checkpoint(
                    owners[record.model_id], path, lambda each: None if each.is_expired(now) else each
                )
        return min((each.expires_at - now for each in expiries.values() if each.expires_at), default=MAX_INTERVAL_S)


class CheckpointExpiry:
    """Deletes checkpoints that have expired."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    async def run(self) -> None:
        """Delete expired checkpoints until cancelled."""
        while True:
            wait_s = MAX_INTERVAL_S
            try:
                wait_s = await self._checkpoints.delete_expired()
            except redis_errors.RedisError as error:
                logger.warning("Redis unavailable: %s; expired checkpoints are deleted when it is back", error)
            await asyncio.sleep(min(max(wait_s, 0.1), MAX_INTERVAL_S))


def _link_tree(source: Path, final: Path) -> None:
    """Copy a folder, sharing its files' storage where the file system can."""
    make_folder(final.parent)
    written = final.with_name(f".{final.name}.{uuid.uuid4().hex}")
    try:
        shutil.copytree(source, written, copy_function=_link)
        sync_tree(written)
        with suppress(OSError):  # a repeated call was faster
            written.rename(final)
    finally:
        shutil.rmtree(written, ignore_errors=True)
    if not final.is_dir():
        raise FileNotFoundError(final)
    sync_folder(final.parent)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
