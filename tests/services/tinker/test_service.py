"""Calls of the service that its routes do not show by themselves."""

import asyncio

import pytest

from offbeat.services.errors import RetryableError
from offbeat.services.redis.connection import connect_async
from offbeat.services.redis.errors import RedisReadOnlyError
from offbeat.services.tinker.errors import GoneError
from offbeat.services.tinker.records import RefusedCommand
from offbeat.services.tinker.schemas import LoadWeightsBody
from offbeat.services.tinker.service import _wait
from tests.services.tinker.test_app import CONFIG, make_service


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
