"""Retries of an unavailable service."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from offbeat.services.errors import RetryableError

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 1.0


async def retry_until_answered(call: Callable[[], Awaitable[T]], patience_s: float = math.inf) -> T:
    """Retry an idempotent call; raises its `RetryableError` after `patience_s`."""
    deadline = time.monotonic() + patience_s
    wait_s = FIRST_WAIT_S
    while True:
        try:
            return await call()
        except RetryableError as error:
            if time.monotonic() > deadline:
                raise
            log.info("waiting %.2g s: %s", wait_s, error)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
