"""A replica whose engine sleeps in the learner's turns: what requests, updates and failures meet."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from offbeat.services.errors import GenerationError, RetryableError
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.messages.types import Completion, FinishReason, VersionSpan
from tests.services.generation.test_replica import Stage, settle


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage(GenerationConfig(request_timeout_s=60.0))
    await stage.publish(0)
    yield stage
    await stage.close()


def aborted(request_id: str, *tokens: int) -> Completion:
    spans = (VersionSpan(0, len(tokens), 0),) if tokens else ()
    logprobs = (-0.5,) * len(tokens)
    return Completion(request_id, tokens, logprobs, spans, FinishReason.ABORT, replica_id="r")


async def test_requests_return_with_their_tokens_when_the_engine_sleeps(stage: Stage) -> None:
    """One that samples, one that waits for a version, and one that comes during the sleep; then the calls stay open."""
    calls = [stage.call("running"), stage.call("waiting", min_version=1)]
    await stage.asked("running")
    stage.engine.sampled["running"] = (5, 6)
    await stage.replica.sleep()
    assert stage.engine.is_asleep
    calls.append(stage.call("late"))
    await settle()
    assert stage.engine.handed_in == [("running", 0)]
    assert not any(call.done() for call in calls)
    await stage.replica.wake()
    assert [await call for call in calls] == [
        [[aborted("running", 5, 6)]],
        [[aborted("waiting")]],
        [[aborted("late")]],
    ]


async def test_a_request_that_reaches_the_engine_late_is_aborted_too(stage: Stage) -> None:
    stage.engine.num_early_aborts = 2
    call = stage.call("running")
    await stage.asked("running")
    await stage.replica.sleep()
    await stage.replica.wake()
    assert await call == [[aborted("running")]]


async def test_tokens_on_a_prompt_of_older_weights_are_not_kept(stage: Stage) -> None:
    call = stage.call("running")
    await stage.asked("running")
    stage.engine.sampled["running"] = (5,)
    await stage.publish(1)
    await stage.replica.sleep()
    await stage.replica.wake()
    assert await call == [[aborted("running")]]


async def test_an_engine_wakes_with_the_newest_weights(stage: Stage) -> None:
    """A sleeping engine loads nothing, and serves nothing of before when it wakes."""
    await stage.replica.sleep()
    await stage.broker.publish(1)
    await settle()
    await stage.broker.publish(2)
    await settle()
    assert stage.engine.loads == [0]
    stage.engine.may_load.clear()
    waking = asyncio.create_task(stage.replica.wake())
    await settle()
    early = stage.call("early")
    await settle()
    assert stage.engine.handed_in == []
    stage.engine.may_load.set()
    await waking
    assert await early == [[aborted("early")]]
    call = stage.call("awake")
    await stage.asked("awake")
    stage.engine.finish("awake")
    (((completion,),)) = await call
    assert completion.versions[0].version == 2
    await settle()
    assert stage.engine.loads == [0, 2], "a version that waited for the engine does not replace a newer one"


async def test_an_engine_wakes_with_its_weights_if_newer_ones_are_damaged(stage: Stage) -> None:
    stage.broker.damaged.add(1)
    await stage.replica.sleep()
    await stage.broker.publish(1)
    await stage.replica.wake()
    call = stage.call("awake")
    await stage.asked("awake")
    stage.engine.finish("awake")
    ((completion,),) = await call
    assert completion.versions[0].version == 0


async def test_an_engine_that_can_not_sleep_is_replaced(stage: Stage) -> None:
    stage.engine.sleep_error = RuntimeError("out of host memory")
    with pytest.raises(GenerationError, match="did not sleep: out of host memory"):
        await stage.replica.sleep()
    with pytest.raises(RetryableError, match="out of host memory"):
        await stage.replica.check_health()
    with pytest.raises(RetryableError, match="out of host memory"):
        await stage.call("late")
