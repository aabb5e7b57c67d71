"""Errors of a Redis that is reachable but refuses writes.

Invariant: a refused command was not executed, not even in part, so it may be repeated.
"""

import re

from redis import exceptions as redis_errors

from offbeat.services.errors import RetryableError

REMEDIES = {
    "MISCONF": "make room on its disk",
    "OOM": "raise its maxmemory",
    "READONLY": "it is a replica: promote it, or bring its primary back",
    "UNBLOCKED": "it became a replica: promote it, or bring its primary back",
    "NOREPLICAS": "bring its replicas back",
    "CLUSTERDOWN": "bring its cluster back",
    "MASTERDOWN": "bring its primary back",
    "TRYAGAIN": "its slots are being moved",
}
"""Code of a temporary refusal -> what to do about it. UNBLOCKED is raised by a blocking read that was under way."""
KINDS = {
    redis_errors.OutOfMemoryError: "OOM",
    redis_errors.ReadOnlyError: "READONLY",
    redis_errors.ClusterDownError: "CLUSTERDOWN",
    redis_errors.MasterDownError: "MASTERDOWN",
    redis_errors.TryAgainError: "TRYAGAIN",
}
"""redis-py's own classes, whose text lacks the code."""
REFUSAL = re.compile(rf"(?:^|: -?)(?P<code>{'|'.join(REMEDIES)}) (?P<why>.*)", re.DOTALL)
"""A script's error has the code in front in Redis 7, and after the place in the script in Redis 6."""
IN_PIPELINE = " of pipeline caused error: "
"""Prefix that redis-py adds to an error of one of several commands."""
AS_TUPLE = re.compile(r"""^\(['"](.*)['"],\)$""", re.DOTALL)
"""Form of that error in redis-py's asynchronous pipelines."""


class RedisReadOnlyError(redis_errors.ConnectionError):
    """Redis is reachable but refuses writes; a refused command has had no effect. Callers handle it like an unreachable
    Redis."""


def complaint(error: Exception) -> str:
    """Return a message about a Redis that raised `error`."""
    return str(error) if isinstance(error, RedisReadOnlyError) else f"Redis does not answer: {error}"


def retryable(error: Exception) -> RetryableError:
    """Return a `ConnectionError` or `TimeoutError` of Redis as the mesh calls it."""
    return RetryableError(complaint(error))


def find_refusal(error: redis_errors.ResponseError) -> RedisReadOnlyError | None:
    """Return Redis' refusal of a write, or None for any other error. Redis checks before a command, or before a
    script's first write, so nothing was executed."""
    text = AS_TUPLE.sub(r"\1", str(error).rpartition(IN_PIPELINE)[2])
    code = KINDS.get(type(error))
    if code is None:
        found = REFUSAL.search(text)
        if found is None:
            return None
        code, text = found["code"], found["why"]
    refusal = RedisReadOnlyError(f"Redis refuses writes: {code} {text.rstrip('.')} ({REMEDIES[code]})")
    refusal.__cause__ = error
    return refusal
