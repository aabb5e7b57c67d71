import asyncio

import pytest

from offbeat.envs.event_loop import run_coroutine


async def answer(value: int) -> int:
    await asyncio.sleep(0)
    if value < 0:
        raise ValueError("negative")
    return value


def test_a_coroutine_runs_without_an_event_loop():
    assert run_coroutine(answer(3)) == 3


async def test_a_coroutine_runs_within_a_running_event_loop():
    assert run_coroutine(answer(3)) == 3
    with pytest.raises(ValueError, match="negative"):
        run_coroutine(answer(-1))
