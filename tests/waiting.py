"""Waiting for conditions instead of sleeping."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

PATIENCE_S = 60.0
"""Long: a start of Python took more than 10 s beside the tests of the mesh. What is true at once is not waited for."""


async def wait_until(
    predicate: Callable[[], bool | Awaitable[bool]], timeout_s: float = PATIENCE_S, every_s: float = 0.01
) -> None:
    """Return once `predicate()` is true.

    Raises:
        TimeoutError: it was still false after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        result = predicate()
        if await result if inspect.isawaitable(result) else result:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"not true within {timeout_s} s: {inspect.getsource(predicate).strip()}")
        await asyncio.sleep(every_s)


def wait_until_sync(predicate: Callable[[], bool], timeout_s: float = PATIENCE_S, every_s: float = 0.01) -> None:
    """`wait_until` for synchronous tests."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not true within {timeout_s} s: {inspect.getsource(predicate).strip()}")
        time.sleep(every_s)
