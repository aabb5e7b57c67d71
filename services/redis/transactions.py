"""Optimistic transactions."""

import functools
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from redis.exceptions import WatchError

P = ParamSpec("P")
R = TypeVar("R")


def repeat_transaction(method: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Repeat a transaction on `WatchError`: keys changed or connection lost."""

    @functools.wraps(method)
    async def repeat(*args: P.args, **kwargs: P.kwargs) -> R:
        while True:
            with suppress(WatchError):
                return await method(*args, **kwargs)

    return repeat
