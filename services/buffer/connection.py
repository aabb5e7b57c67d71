"""Connections to the run's Redis that live through its restarts.

A command whose connection breaks is sent again for about `patience_s`. Every script of the buffer, the lease and the broker
may be repeated; do not use these clients for commands that may not.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis import Redis
from redis import exceptions as redis_errors
from redis.asyncio import BlockingConnectionPool
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

T = TypeVar("T")

SOCKET_TIMEOUT_S = 15.0
"""A Redis that answers nothing for so long counts as gone; above the longest blocking read."""
CONNECT_TIMEOUT_S = 5.0
RETRY_BASE_S = 0.02
RETRY_CAP_S = 0.5
MAX_RETRIES = 200
"""Ends what fails at once each time though Redis is there."""
LONGEST_BLOCK_S = 5.0
"""Longest blocking read; below the clients' socket timeout, so that a dead connection is noticed."""


def _delay_s(failures: int) -> float:
    return min(RETRY_CAP_S, RETRY_BASE_S * 2 ** min(failures, 10))


class PatientRetry(Retry):
    """Tries again until `patience_s` is over, however long a single try takes; redis-py's own counts tries, and a server
    that hangs costs a socket timeout with each."""

    def __init__(self, patience_s: float) -> None:
        super().__init__(NoBackoff(), MAX_RETRIES)
        self._patience_s = patience_s

    def call_with_retry(
        self,
        do: Callable[[], T],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """See `redis.retry.Retry.call_with_retry`. `fail` disconnects, so that the next `do` connects anew."""
        deadline = time.monotonic() + self._patience_s
        failures = 0
        while True:
            try:
                return do()
            except self._supported_errors as error:
                if is_retryable is not None and not is_retryable(error):
                    raise
                failures += 1
                _ = fail(error, failures) if with_failure_count else fail(error)
                if time.monotonic() > deadline or failures > self._retries:
                    raise
            time.sleep(_delay_s(failures))


class AsyncPatientRetry(AsyncRetry):
    """`PatientRetry` for a loop."""

    def __init__(self, patience_s: float) -> None:
        super().__init__(NoBackoff(), MAX_RETRIES)
        self._patience_s = patience_s

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[T]],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """See `PatientRetry.call_with_retry`."""
        deadline = time.monotonic() + self._patience_s
        failures = 0
        while True:
            try:
                return await do()
            except self._supported_errors as error:
                if is_retryable is not None and not is_retryable(error):
                    raise
                failures += 1
                await (fail(error, failures) if with_failure_count else fail(error))
                if time.monotonic() > deadline or failures > self._retries:
                    raise
            await asyncio.sleep(_delay_s(failures))


class Cancellable:
    """Mixed into a connection of redis-py: who is cancelled while it sends is cancelled.

    redis-py bounds its sends by `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that comes when what it
    waited for has just ended (https://github.com/python/cpython/issues/86296): a task that was told to end went on for ever.
    """

    async def send_packed_command(self: Any, command: Any, check_health: bool = True) -> None:
        """See `redis.asyncio.connection.AbstractConnection.send_packed_command`."""
        if not self.is_connected:
            await self.connect()  # whose answers the socket's timeout bounds
        limit, self.socket_timeout = self.socket_timeout, None
        try:
            async with asyncio.timeout(limit):
                await super().send_packed_command(command, check_health)  # pyright: ignore
        except TimeoutError:
            await self.disconnect(nowait=True)
            raise redis_errors.TimeoutError("Timeout writing to socket") from None
        finally:
            self.socket_timeout = limit


def connect(url: str, *, patience_s: float = 30.0) -> Redis:
    """A client for one process; thread-safe. Raises nothing before the first command."""
    return Redis.from_url(
        url,
        retry=PatientRetry(patience_s),
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_keepalive=True,
    )


def connect_async(url: str, *, patience_s: float = 30.0, max_connections: int = 16) -> AsyncRedis:
    """A client for one loop; more callers than connections wait for one. Close it with `aclose()`."""
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=None,
        retry=AsyncPatientRetry(patience_s),
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_keepalive=True,
    )
    pool.connection_class = type("CancellableConnection", (Cancellable, pool.connection_class), {})
    return AsyncRedis.from_pool(pool)
