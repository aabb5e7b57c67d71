"""Expiry, deletion and copies of checkpoints over a real Redis, whoever dies or repeats when."""

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace
from redis import Redis

from offbeat.services.redis.connection import connect, connect_async
from offbeat.services.tinker.config import TinkerConfig
from offbeat.services.tinker.errors import NotFoundError, TinkerError
from offbeat.services.tinker.log import CommandLog
from offbeat.services.tinker.records import (
    AdapterVersion,
    CheckpointRecord,
    LoadWeights,
    Lora,
    ModelRecord,
    SamplerRecord,
    SaveWeights,
    encode_command,
)
from offbeat.services.tinker.schemas import CopyWeightsBody
from offbeat.services.tinker.service import TinkerService
from tests.services.tinker.api_server import make_service
from tests.waiting import wait_until

OWNER, MODEL = "owner", "s:train:0"
LORA = Lora(rank=1, seed=1)
PATH = f"tinker://{MODEL}/weights/a"
CONFIG = TinkerConfig(max_saved_gib=1.0)


class Saved:
    """Service, and a checkpoint of 10 bytes on disk."""

    def __init__(self, service: TinkerService, root: Path) -> None:
        self.service, self.store, self.checkpoints = service, service.store, service.checkpoints
        self.folder = root / "checkpoints" / MODEL / "weights" / "a@3"

    async def save(self, folder: Path | None = None, **fields: Any) -> CheckpointRecord:
        folder = folder or self.folder
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(bytes(10))
        adapter = AdapterVersion(folder=str(folder), version=2)
        record = CheckpointRecord(
            model_id=MODEL, kind="training", created_at=1.0, adapter=adapter, lora=LORA, size_bytes=10, **fields
        )
        await self.store.put(self.store.keys.checkpoints, PATH, record)
        return record

    async def found(self) -> CheckpointRecord | None:
        return await self.store.find(self.store.keys.checkpoints, PATH, CheckpointRecord)


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    with connect(redis_url) as redis:
        yield redis


@pytest_asyncio.fixture
async def saved(redis_url: str, tmp_path: Path) -> AsyncIterator[Saved]:
    redis = connect_async(redis_url)
    service = make_service(redis, CONFIG)
    await service.store.add_model(MODEL, ModelRecord(owner=OWNER, session_id="s", created_at=0.0, lora=LORA))
    yield Saved(service, tmp_path)
    await redis.aclose()


async def test_an_expired_checkpoint_is_not_found_and_then_deleted(saved: Saved, redis: Redis) -> None:
    """Its time is in Redis, so that any later server deletes it."""
    await saved.save(expires_at=time.time() - 1)
    with pytest.raises(NotFoundError):
        await saved.service.records.checkpoint(OWNER, PATH)
    assert await saved.service.records.checkpoints(OWNER) == {}
    async with saved.service.background():

        async def is_gone() -> bool:
            return await saved.found() is None

        await wait_until(is_gone)
    assert CommandLog(redis, "test").unused_folders() == [str(saved.folder)]


async def test_what_has_not_expired_stays(saved: Saved) -> None:
    record = await saved.save(expires_at=time.time() + 1000)
    assert 0 < await saved.checkpoints.delete_expired() <= 1000
    assert await saved.found() == record
    await saved.checkpoints.set_ttl(OWNER, PATH, None)
    assert await saved.found() == replace(record, expires_at=None)


async def test_a_deleted_checkpoints_files_stay_until_nothing_can_read_or_write_them_again(
    saved: Saved, redis: Redis
) -> None:
    await saved.save()
    log, keys = CommandLog(redis, "test"), saved.store.keys
    assert log.unused_folders() == []
    await saved.checkpoints.delete(OWNER, PATH)
    for key, field, record in (
        (keys.log(MODEL), "7", encode_command(LoadWeights(PATH, str(saved.folder), with_optimizer=True))),
        (keys.log(MODEL), "3", encode_command(SaveWeights(name="a", kind="training"))),
        (
            keys.samplers,
            "s:0",
            SamplerRecord(owner=OWNER, adapter=AdapterVersion(folder=str(saved.folder), version=2)).encode(),
        ),
    ):
        redis.hset(key, field, record)
        assert log.unused_folders() == []
        redis.hdel(key, field)
    assert log.unused_folders() == [str(saved.folder)]
    log.forget_folder(str(saved.folder))
    assert log.unused_folders() == []


async def test_a_checkpoint_that_is_overwritten_meanwhile_is_not_deleted(saved: Saved) -> None:
    await saved.save(expires_at=time.time() - 1)
    newer = await saved.save(saved.folder.with_name("a@9"))
    await saved.checkpoints.delete_expired()
    assert await saved.found() == newer
    assert saved.folder.with_name("a@9").exists()


async def test_a_change_is_made_to_the_newest_record(saved: Saved, redis_url: str) -> None:
    """A save between reading and writing is not undone."""
    await saved.save()
    seen: list[str] = []
    replaced = CheckpointRecord(
        model_id=MODEL, kind="training", created_at=2.0, adapter=AdapterVersion(folder="/b", version=3), lora=LORA
    )

    def change(record: CheckpointRecord) -> CheckpointRecord:
        if not seen:
            with connect(redis_url) as learner:
                learner.hset(saved.store.keys.checkpoints, PATH, replaced.encode())
        seen.append(record.adapter.folder)
        return replace(record, expires_at=5.0)

    assert await saved.store.change_checkpoint(OWNER, PATH, change) == replaced
    assert seen == [str(saved.folder), "/b"]
    assert await saved.found() == replace(replaced, expires_at=5.0)


async def test_a_copy_shares_files_and_counts_for_its_owner(saved: Saved) -> None:
    source = await saved.save(expires_at=time.time() + 1000)
    body = CopyWeightsBody(source_path=PATH)
    path = await saved.checkpoints.copy(OWNER, body, "key")
    assert await saved.checkpoints.copy(OWNER, body, "key") == path
    record = await saved.service.records.checkpoint(OWNER, path)
    assert (record.expires_at, record.adapter.version) == (None, source.adapter.version)
    assert (Path(record.adapter.folder) / "weights").samefile(saved.folder / "weights")
    assert await saved.store.saved_bytes(OWNER) == 10
    assert record.model_id not in await saved.store.open_models(OWNER)
    assert record.model_id not in await saved.store.models_of_all()
    with pytest.raises(NotFoundError):
        await saved.checkpoints.copy("another", body, "key")


async def test_a_copy_beyond_the_limit_is_refused(saved: Saved) -> None:
    await saved.save()
    redis: Any = saved.store._redis
    await redis.hset(saved.store.keys.checkpoint_sizes(OWNER), PATH, 2 << 30)
    with pytest.raises(TinkerError, match=r"tinker\.max_saved_gib"):
        await saved.checkpoints.copy(OWNER, CopyWeightsBody(source_path=PATH), "")
