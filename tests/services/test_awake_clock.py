"""Limits on a clock that stands still while the engines sleep."""

import asyncio
import time
from contextlib import suppress

import pytest

from offbeat.services.awake_clock import AwakeClock


async def limited(clock: AwakeClock, seconds: float) -> float:
    """Return the time of the clock that a limit allowed."""
    began = clock.time()
    with suppress(TimeoutError):
        async with asyncio.timeout(None) as limit:
            with clock.limited(limit, seconds):
                await asyncio.Event().wait()
    return clock.time() - began


async def test_a_limit_counts_the_time_of_its_clock() -> None:
    clock, began = AwakeClock(), time.monotonic()
    limits = [asyncio.create_task(limited(clock, seconds)) for seconds in (0.2, 0.3)]
    await asyncio.sleep(0.05)
    with clock.stopped():
        late = asyncio.create_task(limited(clock, 0.1))
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in (*limits, late))
        stopped = clock.time()
        with clock.stopped():
            pass
        assert clock.time() == stopped, "of overlapping stops, the last ends it"
    for counted, seconds in zip(await asyncio.gather(*limits, late), (0.2, 0.3, 0.1), strict=True):
        assert counted >= 0.99 * seconds
    assert time.monotonic() - began > 0.7


async def test_an_expired_limit_is_left_alone() -> None:
    clock = AwakeClock()

    async def stop_late() -> None:
        async with asyncio.timeout(None) as limit:
            with clock.limited(limit, 0.0):
                try:
                    await asyncio.Event().wait()
                finally:
                    with clock.stopped():
                        pass

    with pytest.raises(TimeoutError):
        await stop_late()


async def test_a_limit_leaves_the_timers_of_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of episodes begin while thousands are limited."""
    calls: list[asyncio.Timeout] = []
    reschedule = asyncio.Timeout.reschedule

    def counted(limit: asyncio.Timeout, when: float | None) -> None:
        if when is not None:
            calls.append(limit)
        reschedule(limit, when)

    monkeypatch.setattr(asyncio.Timeout, "reschedule", counted)
    clock = AwakeClock()
    tasks = [asyncio.create_task(limited(clock, 60.0)) for _ in range(10)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(calls) == len(set(calls)) == len(tasks)
