"""Answers while Redis or the disk fails: JSON with the reason, and a status that lets clients repeat the call."""

import uuid
from pathlib import Path

import httpx

from offbeat.services.redis.connection import connect_async
from offbeat.services.tinker.app import create_app
from offbeat.services.tinker.checkpoints import COPIES
from offbeat.services.tinker.owners import Keys
from offbeat.services.tinker.records import AdapterVersion, CheckpointRecord
from tests.services.tinker.api_server import CONFIG, KEY, Server, make_service


async def test_without_redis_a_call_is_answered_with_the_reason() -> None:
    async with connect_async("redis://127.0.0.1:1/0", patience_s=0.0) as redis:
        transport = httpx.ASGITransport(
            create_app(make_service(redis, CONFIG), Keys(None), CONFIG), raise_app_exceptions=False
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://[::1]/api/v1") as client:
            answer = await client.post("/create_session", json={}, headers=KEY)
    assert answer.status_code == 503
    assert answer.json()["detail"].startswith("Redis does not answer: ")


async def test_an_error_of_ours_in_redis_is_no_outage(server: Server) -> None:
    """Redis has answered, and would answer the same again."""
    session, _ = await server.create_model()
    server.redis.set(server.log.keys.heartbeats, "no hash")
    answer = await server.client.post("/session_heartbeat", json={"session_id": session}, headers=KEY)
    assert answer.status_code == 500


async def test_a_copy_that_cannot_be_written_is_answered_with_the_reason(server: Server, tmp_path: Path) -> None:
    """A file is in the place of its folder."""
    _, model = await server.create_model()
    record, path = server.log.model(model), f"tinker://{model}/weights/a"
    folder = tmp_path / "checkpoints" / model / "weights" / "a@1"
    folder.mkdir(parents=True)
    adapter = AdapterVersion(folder=str(folder), version=0)
    saved = CheckpointRecord(model_id=model, kind="training", created_at=0.0, adapter=adapter, lora=record.lora)
    await server.service.store.put(server.log.keys.checkpoints, path, saved)
    copy = tmp_path / "checkpoints" / f"{uuid.uuid5(COPIES, f'{record.owner}:key')}:train:0"
    copy.touch()
    answer = await server.post("/copy_weights", {"source_path": path}, 503, {**KEY, "X-Idempotency-Key": "key"})
    assert str(copy) in answer["detail"]
