"""Redis clients that retry through restarts and refused writes.

Commands are repeated for about `patience_s`, so they must be idempotent.
"""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from redis import Redis
from redis import exceptions as redis_errors
from redis.asyncio import BlockingConnectionPool
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from offbeat.services.redis.errors import IN_PIPELINE, RedisReadOnlyError, find_refusal
from offbeat.services.redis.incarnation import verify_on_connect, verify_on_connect_async

T = TypeVar("T")
ShouldRetry = Callable[[Exception], bool]
"""Called before each retry after `patience_s`; True continues."""

DEFAULT_PORT = 6379
"""Of URLs without one."""
SOCKET_TIMEOUT_S = 15.0
"""Exceeds `MAX_BLOCK_S`."""
CONNECT_TIMEOUT_S = 5.0
RETRY_BASE_S = 0.02
RETRY_CAP_S = 0.5
MAX_RETRIES = 200
"""Bound for calls that fail at once."""
MAX_BLOCK_S = 5.0
"""Longest blocking read."""


def local_address(redis: Redis) -> str:
    """Return this host's address on the way to Redis."""
    options = redis.connection_pool.connection_kwargs
    try:
        host, port = options["host"], options.get("port", DEFAULT_PORT)
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except (KeyError, OSError):  # a Unix socket, or no way
        return "127.0.0.1"


def _raise_first_error(answer: T) -> T:
    for each in cast(list[object], answer) if isinstance(answer, list) else ():
        if isinstance(each, redis_errors.ResponseError) and find_refusal(each):
            raise each
    return answer


def _never(_: Exception) -> bool:
    return False


class _RetryState:
    def __init__(self, patience_s: float, should_retry: ShouldRetry) -> None:
        self._deadline = time.monotonic() + patience_s
        self._should_retry = should_retry
        self.failures = 0

    def delay_s(self, error: Exception) -> float:
        """Return the delay before the next try, or raise `error`."""
        over = time.monotonic() > self._deadline or self.failures > MAX_RETRIES
        if over and (isinstance(error, redis_errors.AuthenticationError) or not self._should_retry(error)):
            raise error
        return min(RETRY_CAP_S, RETRY_BASE_S * 2 ** min(self.failures, 10))

    def count_refusal(self, error: redis_errors.ResponseError) -> RedisReadOnlyError:
        """Count a refused write; raise other errors, and a transaction's, as its keys are unwatched."""
        refusal = find_refusal(error)
        if refusal is None:
            raise error
        if IN_PIPELINE in str(error) or isinstance(error, redis_errors.ExecAbortError):
            raise refusal
        self.failures += 1
        return refusal


class OutageRetry(Retry):
    """Retries for `patience_s`, then while `should_retry` returns True.

    redis-py's own policy counts tries.
    """

    def __init__(self, patience_s: float, should_retry: ShouldRetry = _never) -> None:
        super().__init__(NoBackoff(), MAX_RETRIES)
        self._patience_s = patience_s
        self._should_retry = should_retry

    def __deepcopy__(self, _: object) -> "OutageRetry":
        return self  # redis-py copies it for each connection; it holds nothing of any

    def call_with_retry(
        self,
        do: Callable[[], T],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """Retry `do`; `fail` disconnects, except after a refused write."""
        patience = _RetryState(self._patience_s, self._should_retry)
        while True:
            try:
                return _raise_first_error(do())
            except redis_errors.ResponseError as error:
                failure: Exception = patience.count_refusal(error)
            except self._supported_errors as error:
                if is_retryable is not None and not is_retryable(error):
                    raise
                patience.failures += 1
                _ = fail(error, patience.failures) if with_failure_count else fail(error)
                failure = error
            time.sleep(patience.delay_s(failure))


class AsyncOutageRetry(AsyncRetry):
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
        patience = _RetryState(self._patience_s, _never)
        while True:
            try:
                return _raise_first_error(await do())
            except redis_errors.ResponseError as error:
                failure: Exception = patience.count_refusal(error)
            except self._supported_errors as error:
                if is_retryable is not None and not is_retryable(error):
                    raise
                patience.failures += 1
                await (fail(error, patience.failures) if with_failure_count else fail(error))
                failure = error
            await asyncio.sleep(patience.delay_s(failure))


class Cancellable:
    """Mixin that delivers cancellations during a send.

    Before Python 3.12, redis-py's `asyncio.wait_for` loses some (https://github.com/python/cpython/issues/86296).
    """

    async def send_packed_command(self: Any, command: Any, check_health: bool = True) -> None:
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


def connect(
    url: str, *, patience_s: float = 30.0, should_retry: ShouldRetry = _never, run_id: str | None = None
) -> Redis:
    """Return a thread-safe client that connects at the first command.

    should_retry: called in the calling thread. run_id: run whose incarnation each connection verifies.
    """
    return Redis.from_url(
        url,
        retry=OutageRetry(patience_s, should_retry),
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_keepalive=True,
        redis_connect_func=None if run_id is None else verify_on_connect(run_id),
    )


def connect_async(
    url: str, *, patience_s: float = 30.0, max_connections: int = 16, run_id: str | None = None
) -> AsyncRedis:
    """Return a client for one event loop, to close with `aclose()`; calls wait for a free connection."""
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=None,
        retry=AsyncOutageRetry(patience_s),
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_keepalive=True,
        redis_connect_func=None if run_id is None else verify_on_connect_async(run_id),
    )
    pool.connection_class = type("CancellableConnection", (Cancellable, pool.connection_class), {})
    return AsyncRedis.from_pool(pool)
