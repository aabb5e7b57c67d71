"""Replicas' requests for weights in the learner's GPU memory, as JSON over Redis.

A replica requests, receives the parameters of its side of vLLM's transfer engine, loads and reports. The learner serves
one request at a time.
"""

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from redis import Redis
from redis import exceptions as redis_errors

from offbeat.services.errors import WeightsError
from offbeat.services.keys import RunKeys
from offbeat.services.redis.connection import local_address
from offbeat.services.redis.errors import retryable

Result = TypeVar("Result")
PullParameters = dict[str, Any]
"""`init` and `update` for vLLM's engine, or `error`."""

PULL_TTL_S = 600
"""Expiry of unread answers."""
HEARTBEAT_TTL_S = 15
"""Time without a heartbeat after which the learner, or a replica that loads, counts as gone."""
CHECK_INTERVAL_S = 5.0
"""Longest blocking read; below the clients' socket timeout and `HEARTBEAT_TTL_S`."""


@dataclass(frozen=True, slots=True)
class TensorPull:
    pull_id: str
    version: int
    workers: int
    expires_at: float
    """Unix time, s."""


class PullServer:
    """The learner's side."""

    def __init__(self, redis: Redis, run_id: str, token: str) -> None:
        self._redis = redis
        self._keys = RunKeys(run_id)
        self._token = token

    @property
    def address(self) -> str:
        """This host's address for the replicas."""
        return local_address(self._redis)

    def take(self, timeout_s: float) -> TensorPull | None:
        """Return the next request of a living replica; renews the heartbeat."""
        self._renew_holder()
        reply = cast(Any, self._redis.blpop([self._keys.key("pulls")], timeout=timeout_s))
        if reply is None:
            return None
        pull = TensorPull(**json.loads(reply[1]))
        return pull if self._is_wanted(pull) else None

    def answer(self, pull: TensorPull, parameters: PullParameters) -> None:
        key = self._keys.key("pull", pull.pull_id)
        self._redis.rpush(key, json.dumps(parameters))
        self._redis.expire(key, PULL_TTL_S)

    def wait_done(self, pull: TensorPull) -> None:
        """Wait until the replica has loaded; raises `WeightsError` on its failure, death or timeout."""
        key, reply = self._keys.key("pull", pull.pull_id, "done"), None
        while reply is None and self._is_wanted(pull):
            self._renew_holder()
            reply = cast(Any, self._redis.blpop([key], timeout=CHECK_INTERVAL_S))
        if reply is None or reply[1] != b"ok":
            raise WeightsError(f"a replica did not load version {pull.version}")

    def run_for(self, pull: TensorPull, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread and return its result; leave it and raise `WeightsError` once the replica is gone."""
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # of whoever waits
                future.set_exception(error)

        threading.Thread(target=run, name="weights-work", daemon=True).start()
        while self._is_wanted(pull):
            self._renew_holder()
            if wait([future], timeout=CHECK_INTERVAL_S).done:
                return future.result()
        raise WeightsError(f"a replica that asked for version {pull.version} is gone")

    def _is_wanted(self, pull: TensorPull) -> bool:
        return pull.expires_at > time.time() and bool(self._redis.exists(_loader_key(self._keys, pull.pull_id)))

    def _renew_holder(self) -> None:
        self._redis.set(self._keys.key("pulls", "holder"), self._token, ex=HEARTBEAT_TTL_S)

    def leave(self) -> None:
        self._redis.delete(self._keys.key("pulls", "holder"))


@contextmanager
def _translate_redis_errors() -> Iterator[None]:
    try:
        yield
    except (redis_errors.ConnectionError, redis_errors.TimeoutError) as error:
        raise retryable(error) from error


def holder(redis: Redis, run_id: str) -> str:
    """Return the serving learner's token, or ""; raises `RetryableError` if Redis does not answer."""
    with _translate_redis_errors():
        token = cast(bytes | None, redis.get(RunKeys(run_id).key("pulls", "holder")))
    return token.decode() if token else ""


@contextmanager
def open_pull(redis: Redis, run_id: str, version: int, *, workers: int, timeout_s: float) -> Iterator[PullParameters]:
    """Yield a pull's parameters to a replica; report success or failure on exit.

    Raises:
        WeightsError: the learner refused, or did not answer in time.
        RetryableError: Redis does not answer, or refuses writes.
    """
    keys = RunKeys(run_id)
    pull = TensorPull(uuid.uuid4().hex, version, workers, time.time() + timeout_s)
    request = {name: getattr(pull, name) for name in TensorPull.__slots__}
    with _heartbeat(redis, _loader_key(keys, pull.pull_id)):
        with _translate_redis_errors():
            redis.rpush(keys.key("pulls"), json.dumps(request))
            reply = cast(Any, redis.blpop([keys.key("pull", pull.pull_id)], timeout=timeout_s))
        if reply is None:
            raise WeightsError(f"the learner did not hand out version {version} within {timeout_s} s")
        parameters: PullParameters = json.loads(reply[1])
        if "error" in parameters:
            raise WeightsError(f"the learner refused version {version}: {parameters['error']}")
        done = keys.key("pull", pull.pull_id, "done")
        outcome = "failed"
        try:
            yield parameters
            outcome = "ok"
        finally:
            with _translate_redis_errors():
                redis.rpush(done, outcome)
                redis.expire(done, PULL_TTL_S)


@contextmanager
def _heartbeat(redis: Redis, key: str) -> Iterator[None]:
    """Renew a key, which expires soon after the death of this process."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(CHECK_INTERVAL_S):
            with suppress(redis_errors.RedisError):  # what the pull itself does with an outage counts
                redis.set(key, "", ex=HEARTBEAT_TTL_S)

    with _translate_redis_errors():
        redis.set(key, "", ex=HEARTBEAT_TTL_S)
    thread = threading.Thread(target=renew, name="weights-pull", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(redis_errors.RedisError):
            redis.delete(key)


def _loader_key(keys: RunKeys, pull_id: str) -> str:
    return keys.key("pull", pull_id, "loader")
