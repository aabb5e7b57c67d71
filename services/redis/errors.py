"""Errors of a Redis that refuses writes, without effect."""

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
    "BUSY": "it runs a long script, and answers once that has ended",
}
"""Temporary error code -> remedy."""
KINDS = {
    redis_errors.OutOfMemoryError: "OOM",
    redis_errors.ReadOnlyError: "READONLY",
    redis_errors.ClusterDownError: "CLUSTERDOWN",
    redis_errors.MasterDownError: "MASTERDOWN",
    redis_errors.TryAgainError: "TRYAGAIN",
}
"""redis-py errors without the code in their text."""
REFUSAL = re.compile(rf"(?:^|: -?)(?P<code>{'|'.join(REMEDIES)}) (?P<why>.*)", re.DOTALL)
"""Redis 7 starts a script's error with the code, Redis 6 with the position."""
IN_PIPELINE = " of pipeline caused error: "
"""redis-py's prefix in a pipeline."""
AS_TUPLE = re.compile(r"""^\(['"](.*)['"],\)$""", re.DOTALL)
"""That error in asynchronous pipelines."""


class RedisReadOnlyError(redis_errors.ConnectionError):
    """Refused write, without effect."""


def complaint(error: Exception) -> str:
    return str(error) if isinstance(error, RedisReadOnlyError) else f"Redis does not answer: {error}"


def retryable(error: Exception) -> RetryableError:
    return RetryableError(complaint(error))


def find_outage(error: BaseException | None) -> redis_errors.RedisError | None:
    """Return the failed connection or refused write behind `error`, or None."""
    while error is not None and not isinstance(error, (redis_errors.ConnectionError, redis_errors.TimeoutError)):
        error = error.__cause__
    return error


def find_refusal(error: redis_errors.ResponseError) -> RedisReadOnlyError | None:
    """Return the refused write behind `error`, or None."""
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
