"""What a Redis says that is there and can't take writes now, and what the mesh makes of it.

Invariant: what was refused has not been done, not in part either, so it may be sent again.
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
"""Code of a refusal that passes -> what a person can do. UNBLOCKED is what a blocking read hears that was under way."""
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
"""What redis-py writes before an error that it raises for one of many commands."""
AS_TUPLE = re.compile(r"""^\(['"](.*)['"],\)$""", re.DOTALL)
"""How its asynchronous pipelines write the error there."""


class RedisReadOnlyError(redis_errors.ConnectionError):
    """Redis is there and can't take writes now; it has done nothing of what it refused. To its callers it is as one that
    does not answer."""


def complaint(error: Exception) -> str:
    """What is wrong with a Redis that raised `error`, for people."""
    return str(error) if isinstance(error, RedisReadOnlyError) else f"Redis does not answer: {error}"


def retryable(error: Exception) -> RetryableError:
    """A `ConnectionError` or `TimeoutError` of Redis as the mesh calls it."""
    return RetryableError(complaint(error))


def refused(error: redis_errors.ResponseError) -> RedisReadOnlyError | None:
    """What Redis says if it refuses writes for now; None for every other error of a command. It checks before a command, or
    a script's first write, so nothing has been done."""
    text = AS_TUPLE.sub(r"\1", str(error).rpartition(IN_PIPELINE)[2])
    code = KINDS.get(type(error))
    if code is None:
        found = REFUSAL.search(text)
        if found is None:
            return None
        code, text = found["code"], found["why"]
    told = RedisReadOnlyError(f"Redis refuses writes: {code} {text.rstrip('.')} ({REMEDIES[code]})")
    told.__cause__ = error
    return told
