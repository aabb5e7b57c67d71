import asyncio

import pytest

from offbeat.deploy.local.supervision import run_beside
from offbeat.services.errors import MeshError


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("cancelled")


async def fail() -> None:
    raise MeshError("died")


async def test_the_end_of_the_work_ends_its_supervisors():
    ended: list[str] = []
    assert await run_beside(asyncio.sleep(0.01, "done"), [forever(ended)]) == "done"
    assert ended == ["cancelled"]


async def test_a_failing_supervisor_ends_the_work():
    ended: list[str] = []
    with pytest.raises(MeshError, match="died"):
        await run_beside(forever(ended), [forever(ended), fail()])
    assert ended == ["cancelled", "cancelled"]


async def test_a_cancellation_ends_all():
    ended: list[str] = []
    task = asyncio.create_task(run_beside(forever(ended), [forever(ended)]))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["cancelled", "cancelled"]
