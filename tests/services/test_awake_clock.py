"""Limits on a clock that stands still while the engines sleep."""

import asyncio
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


class ManualTime:
    """Time of the loop's timers and of clocks, which a test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def advance(self, seconds: float) -> None:
        """Let the timers until then fire, and the tasks that they wake run."""
        self.now += seconds
        for _ in range(10):
            await asyncio.sleep(0)


async def test_a_limit_counts_the_time_of_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    time, clock = ManualTime(), AwakeClock()
    monkeypatch.setattr("offbeat.services.awake_clock.time", time)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", time.monotonic)
    limits = [asyncio.create_task(limited(clock, seconds)) for seconds in (2.0, 3.0)]
    await time.advance(0.0)
    await time.advance(1.5)
    with clock.stopped():
        limits.append(asyncio.create_task(limited(clock, 1.0)))
        await time.advance(100.0)
        assert not any(task.done() for task in limits)
        stopped = clock.time()
        with clock.stopped():
            pass
        assert clock.time() == stopped, "of overlapping stops, the last ends it"
    for done in ([False, False, False], [True, False, False], [True, False, True], [True, True, True]):
        await time.advance(0.4)
        assert [task.done() for task in limits] == done
    for counted, seconds in zip(await asyncio.gather(*limits), (2.0, 3.0, 1.0), strict=True):
        assert seconds <= counted <= seconds + 0.4


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
