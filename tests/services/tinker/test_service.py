"""Calls of the service that its routes do not show by themselves."""

import asyncio
import time

import pytest

from offbeat.services.errors import RetryableError
from offbeat.services.redis.connection import connect, connect_async
from offbeat.services.redis.errors import RedisReadOnlyError
from offbeat.services.tinker.errors import GoneError, TinkerError
from offbeat.services.tinker.log import CommandLog
from offbeat.services.tinker.records import (
    AdapterVersion,
    CheckpointRecord,
    Lora,
    ModelRecord,
    RefusedCommand,
    Result,
    decode_command,
)
from offbeat.services.tinker.schemas import LoadWeightsBody
from offbeat.services.tinker.service import MAX_COMMAND_BYTES, _wait
from offbeat.services.tinker.wire import CLASSES
from tests.services.tinker.api_server import CONFIG, make_service


@pytest.mark.parametrize("path", ["", "/data/" + "x" * 260])
async def test_a_path_that_no_checkpoint_has_keeps_its_place_in_the_sequence(redis_url: str, path: str):
    """A 4xx leaves a gap, at which all later commands of the model wait."""
    async with connect_async(redis_url) as redis:
        start = await make_service(redis, CONFIG)._find_start("me", LoadWeightsBody(path=path, optimizer=True))
    assert start == RefusedCommand(f"no checkpoint has a path of {len(path)} characters")


@pytest.mark.parametrize("error", [RedisReadOnlyError("MISCONF"), RetryableError("away"), GoneError("gone")])
async def test_a_sample_that_failed_is_to_be_sent_again(error: Exception):
    async def fail() -> None:
        raise error

    with pytest.raises(GoneError):
        await _wait(asyncio.create_task(fail()), 1.0)  # pyright: ignore[reportArgumentType]


async def test_a_body_that_is_too_large_keeps_its_place_in_the_sequence(redis_url: str):
    message = CLASSES["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn="x" * MAX_COMMAND_BYTES)
    async with connect_async(redis_url) as redis:
        service = make_service(redis, CONFIG)
        record = ModelRecord(owner="me", session_id="s", created_at=time.time(), lora=Lora(rank=1, seed=0))
        await service.store.add_model("m", record)
        await service.forward_backward("me", message.SerializeToString())
    with connect(redis_url) as client:
        data = CommandLog(client, "test").command("m", 1)
    assert data is not None
    assert decode_command(data) == RefusedCommand("the body has more than 64 MiB: send fewer sequences at once")


async def test_a_command_that_an_ended_session_has_not_applied_is_gone(redis_url: str):
    """A client that was asked to wait would do so for ever."""
    async with connect_async(redis_url) as redis:
        service = make_service(redis, CONFIG)
        record = ModelRecord(owner="me", session_id="s", created_at=time.time(), lora=Lora(rank=1, seed=0))
        await service.store.add_model("m", record)
        for seq_id in (0, 2):
            await service.store.submit("m", "me", seq_id, RefusedCommand("no"))
        with connect(redis_url) as client:
            log = CommandLog(client, "test")
            log.take_over()
            log.commit("m", "me", 0, Result.of_error("no"))
            assert log.close("m")
        assert await service.retrieve("me", "m:0") == Result.of_error("no")
        with pytest.raises(GoneError, match="not applied before the session of model m ended"):
            await service.retrieve("me", "m:2")


async def test_a_checkpoint_of_a_rank_that_is_not_served_any_more_is_refused(redis_url: str):
    async with connect_async(redis_url) as redis:
        service = make_service(redis, CONFIG)
        session = await service.records.create_session("me")
        lora = Lora(rank=CONFIG.max_lora_rank + 1, seed=0)
        await service.store.add_model("m", ModelRecord(owner="me", session_id=session, created_at=0.0, lora=lora))
        adapter = AdapterVersion(folder="/nowhere", version=0)
        checkpoint = CheckpointRecord(
            model_id="m", kind="training", created_at=0.0, adapter=adapter, lora=lora, size_bytes=1
        )
        await service.store.put(service.store.keys.checkpoints, "tinker://m/weights/x", checkpoint)
        body = LoadWeightsBody(path="tinker://m/weights/x", optimizer=True, session_id=session, model_seq_id=1)
        with pytest.raises(TinkerError, match=r"exceeds .*tinker\.max_lora_rank"):
            await service.load_weights("me", body)


async def test_a_command_that_is_not_known_is_gone(redis_url: str):
    """It was never sent, or Redis has lost it: a client that was asked to wait would do so for ever."""
    async with connect_async(redis_url) as redis:
        service = make_service(redis, CONFIG)
        record = ModelRecord(owner="me", session_id="s", created_at=time.time(), lora=Lora(rank=1, seed=0))
        await service.store.add_model("m", record)
        with pytest.raises(GoneError, match="Load a checkpoint in a new session"):
            await service.retrieve("me", "m:3")
