"""Calls that travel together stay commands of their own."""

import asyncio
from typing import Any

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.buffer.admin import configure_buffer
from offbeat.services.buffer.scripts import (
    MAX_CALLS_PER_TRIP,
    MAX_ROUND_TRIPS,
    MAX_TRIP_BYTES,
    AsyncBufferScripts,
)
from offbeat.services.errors import BufferError, FencedError
from tests.services.buffer.buffer_play import RUN, limits

MANY = 3 * MAX_CALLS_PER_TRIP * MAX_ROUND_TRIPS


@pytest.fixture
def run_script(redis: Redis, async_redis: AsyncRedis) -> AsyncBufferScripts:
    configure_buffer(redis, RUN, limits())
    return AsyncBufferScripts(async_redis, RUN)


async def submit_late(run_script: AsyncBufferScripts, number: int) -> Any:
    """Hand in a member of a group that there is not."""
    return await run_script.call_merged("submit", ("w",), (f"t:{number}", 0, 0, b"blob"))


async def test_each_of_many_calls_at_once_gets_its_own_answer(run_script: AsyncBufferScripts) -> None:
    calls = [submit_late(run_script, i) if i % 2 else run_script("eval_result", f"e:{i}") for i in range(MANY)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert answers[1::2] == ["late"] * (MANY // 2)
    refusals = answers[::2]
    assert all(isinstance(result, BufferError) for result in refusals)
    assert [str(result).rpartition(" ")[2] for result in refusals] == [str(i) for i in range(0, MANY, 2)]


async def test_a_refused_call_does_not_touch_its_neighbours(run_script: AsyncBufferScripts) -> None:
    calls = (submit_late(run_script, 1), run_script("take", 99, "0-0"), submit_late(run_script, 2))
    before, fenced, after = await asyncio.gather(*calls, return_exceptions=True)
    assert (before, after) == ("late", "late")
    assert isinstance(fenced, FencedError)


async def test_a_redis_that_forgot_its_scripts_gets_them_again(redis: Redis, run_script: AsyncBufferScripts) -> None:
    for _ in range(2):
        redis.script_flush()
        assert await asyncio.gather(*(submit_late(run_script, i) for i in range(5))) == ["late"] * 5


async def test_callers_that_give_up_leave_the_others_their_answers(run_script: AsyncBufferScripts) -> None:
    calls = [asyncio.ensure_future(submit_late(run_script, i)) for i in range(MANY)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert answers[1::2] == ["late"] * (MANY // 2)
    assert all(isinstance(result, asyncio.CancelledError) for result in answers[::2])


async def test_who_calls_again_as_soon_as_it_is_answered_is_never_forgotten(
    redis: Redis, async_redis: AsyncRedis
) -> None:
    configure_buffer(redis, RUN, limits())
    run_script = AsyncBufferScripts(async_redis, RUN, max_round_trips=1)
    async with asyncio.timeout(20):
        for number in range(20):
            assert await submit_late(run_script, number) == "late"


async def test_neighbours_that_share_what_they_say_are_one_command(
    redis: Redis, run_script: AsyncBufferScripts
) -> None:
    await submit_late(run_script, 0)
    redis.config_resetstat()
    assert await asyncio.gather(*(submit_late(run_script, i) for i in range(MANY))) == ["late"] * MANY
    commands = redis.info("commandstats")["cmdstat_evalsha"]["calls"]  # type: ignore[index]
    assert commands == MANY // MAX_CALLS_PER_TRIP


async def test_a_refusal_of_what_neighbours_share_reaches_each_of_them(run_script: AsyncBufferScripts) -> None:
    calls = (run_script.call_merged("take", (99, "0-0"), (i,)) for i in range(3))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(answer) for answer in answers] == [FencedError] * 3


async def test_large_calls_do_not_wait_for_each_other(redis: Redis, run_script: AsyncBufferScripts) -> None:
    await submit_late(run_script, 0)
    redis.config_resetstat()
    large = bytes(MAX_TRIP_BYTES)
    calls = (run_script.call_merged("submit", ("w",), (f"t:{i}", 0, 0, large), len(large)) for i in range(4))
    assert await asyncio.gather(*calls) == ["late"] * 4
    assert redis.info("commandstats")["cmdstat_evalsha"]["calls"] == 4  # type: ignore[index]
