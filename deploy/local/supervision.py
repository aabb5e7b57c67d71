"""Work that ends with its supervisors."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def run_beside(work: Coroutine[Any, Any, T], supervisors: Sequence[Coroutine[Any, Any, object]]) -> T:
    """Run `work` beside never-returning `supervisors`; raise the first error of any."""
    working = asyncio.create_task(work, name="work")
    tasks = [working, *(asyncio.create_task(each, name=each.__qualname__) for each in supervisors)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {working}:
            task.result()
        return await working
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
