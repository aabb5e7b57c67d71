"""Incarnation of a run's data: whether Redis still holds all acknowledged writes.

Every write carries the incarnation known to its process, `<uid>/<number>/<server>/<nonce>`: the run's unique id, a
number that grows with each reconciliation, the server process, a random part. A connection first compares the server
with the stored one; if they differ or the key is missing, writes are refused until a learner has reconciled the data
and each worker has joined it.
"""

import threading
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any, cast

from redis import Redis
from redis import exceptions as redis_errors

from offbeat.services.errors import ForeignRunError, ReconcileError
from offbeat.services.keys import RunKeys
from offbeat.services.redis.errors import retryable

ANY = "*"
"""Carried by the run's owner and readers."""
PENDING = "?"
"""Suffix of an incarnation to reconcile."""

_VERIFY = files("offbeat.services.redis").joinpath("verify.lua").read_text(encoding="utf-8")


def uid_of(incarnation: str) -> str:
    return incarnation.partition("/")[0]


def number_of(incarnation: str) -> int:
    """Return the number; 0 of none."""
    parts = incarnation.split("/")
    return int(parts[1]) if len(parts) > 1 else 0


def verify_on_connect(run_id: str) -> Callable[[Any], None]:
    """Return a `redis_connect_func` that verifies the server."""
    key = RunKeys(run_id).incarnation

    def connected(connection: Any) -> None:
        connection.on_connect()
        connection.send_command("EVAL", _VERIFY, 1, key)
        connection.read_response()

    return connected


def verify_on_connect_async(run_id: str) -> Callable[[Any], Awaitable[None]]:
    key = RunKeys(run_id).incarnation

    async def connected(connection: Any) -> None:
        await connection.on_connect()
        await connection.send_command("EVAL", _VERIFY, 1, key)
        await connection.read_response()

    return connected


class KnownIncarnation:
    """Incarnation known to this process, shared by its clients; thread-safe."""

    def __init__(self, redis: Redis, run_id: str, uid: str = "") -> None:
        self._redis = redis
        self._keys = RunKeys(run_id)
        self._lock = threading.Lock()
        self._value = ""
        self.uid = uid

    @property
    def number(self) -> int:
        return number_of(self._value)

    def set(self, value: str) -> None:
        self._value = value

    def get(self) -> str:
        """Return the incarnation, read from Redis at first.

        Raises:
            ReconcileError: the data must be reconciled first.
            ForeignRunError: the run was created anew under this name.
            RetryableError: Redis does not answer.
        """
        with self._lock:
            self._value = self._value or self._read()
            return self._value

    def _read(self) -> str:
        try:
            stored = cast(bytes | None, self._redis.get(self._keys.incarnation))
            is_deleted = not stored and cast(int, self._redis.ttl(self._keys.epoch)) > 0
        except (redis_errors.ConnectionError, redis_errors.TimeoutError) as error:
            raise retryable(error) from error
        if is_deleted:
            raise ForeignRunError("the run was deleted")
        value = (stored or b"").decode()
        if value and uid_of(value) != self.uid:
            raise ForeignRunError("the run was created anew under this name")
        if not value or value.endswith(PENDING):
            raise ReconcileError("the run's data in Redis has to be reconciled by a learner")
        return value
