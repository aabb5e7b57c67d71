"""A replica whose engine sleeps in the learner's turns: what requests, updates and failures meet."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from offbeat.services.errors import GenerationError, RetryableError
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.rollout.episodes.turn_batcher import TurnBatcher
from tests.services.generation.test_replica import Stage, settle
from tests.services.rollout.episodes.test_turn_batcher import request
from tests.waiting import wait_until

LIMIT_S = 1.5


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage(GenerationConfig(request_timeout_s=LIMIT_S))
    await stage.publish(0)
    yield stage
    await stage.close()


async def test_running_requests_end_before_the_engine_sleeps(stage: Stage) -> None:
    call = stage.call("running")
    await stage.asked("running")
    sleeping = asyncio.create_task(stage.replica.sleep())
    await settle()
    late = stage.call("late")
    await settle()
    assert "late" not in stage.engine.asked
    assert not sleeping.done()
    stage.engine.finish("running")
    await sleeping
    assert stage.engine.is_asleep
    assert [completion.error for batch in await call for completion in batch] == [""]
    await stage.replica.wake()
    await stage.asked("late")
    stage.engine.finish("late")
    assert [completion.error for batch in await late for completion in batch] == [""]


async def test_requests_outlive_a_sleep_longer_than_their_limit(stage: Stage) -> None:
    """Also one that waits for a version when the engine falls asleep, and the worker's call that carries it."""
    early = stage.call("early", min_version=1)
    await settle()
    await stage.replica.sleep()
    batcher = TurnBatcher(stage.replica, 0.0, LIMIT_S)
    sampling = asyncio.create_task(batcher.sample(request("late")))
    began = asyncio.get_running_loop().time()
    await wait_until(lambda: asyncio.get_running_loop().time() > began + 1.3 * LIMIT_S)
    await stage.broker.publish(1)
    await settle()
    assert stage.engine.loads == [0], "a sleeping engine loads nothing"
    assert not sampling.done()
    await stage.replica.wake()
    await stage.asked("early", "late")
    stage.engine.finish("late", version=0)
    stage.engine.finish("early", version=1)
    assert not (await sampling).error
    assert [completion.error for batch in await early for completion in batch] == [""]
    await batcher.close()


async def test_the_limit_counts_again_after_the_sleep(stage: Stage) -> None:
    await stage.replica.sleep()
    call = stage.call("late", min_version=9)
    await settle()
    await stage.replica.wake()
    (completion,) = [completion for batch in await call for completion in batch]
    assert "no answer within" in completion.error


async def test_an_engine_that_can_not_sleep_is_replaced(stage: Stage) -> None:
    stage.engine.sleep_error = RuntimeError("out of host memory")
    with pytest.raises(GenerationError, match="did not sleep: out of host memory"):
        await stage.replica.sleep()
    with pytest.raises(RetryableError, match="out of host memory"):
        await stage.replica.check_health()
    with pytest.raises(RetryableError, match="out of host memory"):
        await stage.call("late")
