"""Learner lease: one learner holds a run; writes of earlier ones are refused.

Invariant: epochs grow with each lease and a run's creation or deletion, every learner write carries one, and Redis
refuses all but the newest. A Redis that forgot the newest lease gets it back from its holder: the greater epoch wins,
and a new lease exceeds every epoch in the run's folder. Expiry only allows a waiting learner to take over; it counts
time in which waiting learners saw Redis accept writes, so that the holder can renew first after an outage.
"""

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Self, cast

from redis import Redis
from redis import exceptions as redis_errors

from offbeat.services.errors import FencedError, ForeignRunError, RetryableError
from offbeat.services.keys import RunKeys
from offbeat.services.redis.connection import RETRY_CAP_S
from offbeat.services.redis.errors import retryable

logger = logging.getLogger(__name__)

RENEWALS_PER_TIMEOUT = 4
MAX_WAIT_S = 5.0
STOP_TIMEOUT_S = 1.0
LEASE_NONCE = "OFFBEAT_LEASE_NONCE"
"""Environment variable: random part of a holder's name, chosen by the host."""
FOREIGN = 2
"""Reply of `_ACQUIRE`."""

_ACQUIRE = """
-- KEYS: lease; epoch; last holder, since when and with which epoch, unless it gave the lease up; looks: ms since when those
-- who wait have looked, gone after a gap; record. ARGV: holder, in ms: timeout, gap, time that a holder needs to renew; uid
-- of the run, greatest epoch known to have been.
-- Returns {1, epoch}: the caller holds the lease (again, if it held it already), or {0, ms until that may change, holder,
-- Unix time since when}: another holds it, or did until it expired and may not have been able to renew it; or {2}: the run
-- was created anew.
local uid = redis.call('HGET', KEYS[5], 'uid')
if uid and uid ~= ARGV[5] then return {2} end
local lease, last = redis.call('GET', KEYS[1]), redis.call('HMGET', KEYS[3], 'holder', 'since', 'epoch')
local holder = lease or (last[3] == redis.call('GET', KEYS[2]) and last[1])
local time = redis.call('TIME')
if holder and holder ~= ARGV[1] then
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local since = tonumber(redis.call('GET', KEYS[4])) or now
  local wait = lease and redis.call('PTTL', KEYS[1]) or since + ARGV[4] - now
  if lease or wait > 0 then
    redis.call('SET', KEYS[4], since, 'PX', ARGV[3])
    return {0, wait, holder, tonumber(last[2] or '0')}
  end
end
if holder ~= ARGV[1] then
  if tonumber(redis.call('GET', KEYS[2]) or '0') < tonumber(ARGV[6]) then redis.call('SET', KEYS[2], ARGV[6]) end
  redis.call('HSET', KEYS[3], 'holder', ARGV[1], 'since', time[1], 'epoch', redis.call('INCR', KEYS[2]))
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {1, tonumber(redis.call('GET', KEYS[2]))}
"""

_RENEW = """
-- KEYS: lease, epoch, last holder, looks, record. ARGV: holder, timeout in ms, epoch, uid of the run.
-- Returns 1: renewed (also after it expired, unless another holder took it, and in a Redis that has forgotten it); 0:
-- another holds the run, or held it since, or the run was created anew or deleted.
local uid, holder = redis.call('HGET', KEYS[5], 'uid'), redis.call('GET', KEYS[1])
local epoch, own = tonumber(redis.call('GET', KEYS[2]) or '0'), tonumber(ARGV[3])
if uid and uid ~= ARGV[4] then return 0 end
if epoch > own or (epoch == own and holder and holder ~= ARGV[1]) then return 0 end
if epoch < own then
  redis.call('SET', KEYS[2], ARGV[3])
  redis.call('HSET', KEYS[3], 'holder', ARGV[1], 'since', redis.call('TIME')[1], 'epoch', ARGV[3])
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

_RELEASE = """
-- KEYS: lease, last holder, bell of those who wait for it. ARGV: holder.
-- Returns 1 if the caller held it.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'released', ARGV[1])
return 1
"""


_FREE = """
-- KEYS: lease, last holder, bell. ARGV: holder, or owner of the lease with the space behind it.
-- Returns 1 if the owner held it, or would again if it renewed it.
local holder = redis.call('GET', KEYS[1]) or redis.call('HGET', KEYS[2], 'holder')
if not holder or string.sub(holder, 1, #ARGV[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'died', ARGV[1])
return 1
"""


def owner_of(pid: int) -> str:
    """Return a local process's owner name, for messages."""
    return f"{socket.gethostname()}:{pid}"


def free_lease_of(redis: Redis, run_id: str, owner: str, nonce: str = "") -> bool:
    """Release a dead learner's lease; return False if it was not the last holder.

    nonce: `LEASE_NONCE` of its process; empty: any.

    Raises:
        RetryableError: Redis does not answer.
    """
    keys = RunKeys(run_id)
    touched = [keys.lease, keys.key("lease", "last"), keys.key("lease", "bell")]
    try:
        return bool(redis.register_script(_FREE)(keys=touched, args=[f"{owner} {nonce}"]))
    except (redis_errors.ConnectionError, redis_errors.TimeoutError) as error:
        raise retryable(error) from error


class LeaseHeldError(RetryableError):
    """Another learner holds the run."""

    def __init__(self, owner: str, since: float) -> None:
        """since: Unix time, s."""
        self.owner = owner
        self.since = since
        super().__init__(
            f"another learner holds the run: {owner}, since {time.strftime('%H:%M:%S', time.localtime(since))}"
        )


class LearnerLease:
    """Lease of a run, renewed by a thread; one object per learner process.

    Args:
        owner: name for messages.
        timeout_s: time without renewal after which the holder may be replaced.
        on_lost: called once, from the renewing thread, when another learner has taken the run.
        newest_epoch: newest epoch known elsewhere (run's folder), forgotten by an emptied, restored or new Redis.
    """

    def __init__(
        self,
        redis: Redis,
        run_id: str,
        owner: str,
        timeout_s: float,
        *,
        on_lost: Callable[[], None] | None = None,
        run_uid: str = "",
        newest_epoch: Callable[[], int] = lambda: 0,
    ) -> None:
        keys = RunKeys(run_id)
        self._redis = redis
        last, self._bell = keys.key("lease", "last"), keys.key("lease", "bell")
        self._keys = [keys.lease, keys.epoch, last, keys.key("lease", "looks"), keys.record]
        self._uid = run_uid
        self._newest_epoch = newest_epoch
        self._keys_of_release = [keys.lease, last, self._bell]
        self._acquire = redis.register_script(_ACQUIRE)
        self._renew = redis.register_script(_RENEW)
        self._release = redis.register_script(_RELEASE)
        self._holder = f"{owner} {os.environ.get(LEASE_NONCE) or uuid.uuid4().hex[:12]}"
        self._timeout_s = timeout_s
        self._renewal_s = timeout_s / RENEWALS_PER_TIMEOUT
        self._on_lost = on_lost
        self._newest_epoch = newest_epoch
        self._epoch: int | None = None
        self._valid_until = 0.0
        self._stop = threading.Event()
        self._lost = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def epoch(self) -> int:
        """Epoch of this learner's writes; raises `FencedError` if never acquired."""
        if self._epoch is None:
            raise FencedError("the lease is not acquired")
        return self._epoch

    def acquire(self, wait_s: float = 0.0) -> int:
        """Acquire the lease within `wait_s`; return the epoch.

        Raises:
            LeaseHeldError: another learner still holds it.
            ForeignRunError: the run was created anew under this name.
            RetryableError: Redis does not answer.
        """
        deadline = time.monotonic() + wait_s
        while True:
            position = self._bell_position()
            asked_at = time.monotonic()
            taken, *values = self._call(self._acquire, *self._acquire_args)
            if taken == FOREIGN:
                raise ForeignRunError("the run was created anew under this name")
            value, *holder = values
            if taken:
                self._epoch = int(value)
                self._valid_until = asked_at + self._timeout_s
                self._thread = threading.Thread(target=self._keep, name="learner-lease", daemon=True)
                self._thread.start()
                return self._epoch
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise LeaseHeldError(holder[0].decode().rpartition(" ")[0], float(holder[1]))
            look_s = min(remaining_s, max(value, 0) / 1000 + 0.005, MAX_WAIT_S, self._renewal_s)
            self._wait_for_release(position, look_s)

    def held(self) -> bool:
        """Return whether the lease is neither expired nor taken."""
        return self._epoch is not None and not self._lost.is_set() and time.monotonic() < self._valid_until

    def reclaim(self) -> None:
        """Renew the lease now, even if Redis has forgotten it.

        Raises:
            FencedError: another learner has taken the run.
            RetryableError: Redis does not answer.
        """
        if not self._renewed():
            self._lost.set()
        self.check()

    def check(self) -> None:
        """Raise `FencedError` if another learner has taken the run."""
        if self._lost.is_set():
            raise FencedError(f"another learner has taken the run from epoch {self._epoch}")

    def release(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)  # it may be waiting for a Redis that is gone; that must not hold us up
            self._thread = None
        held, self._valid_until = self.held(), 0.0
        if held:
            try:
                self._release(keys=self._keys_of_release, args=[self._holder])
            except (redis_errors.ConnectionError, redis_errors.TimeoutError) as error:
                logger.warning("the lease could not be released and will expire: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def _timeout_ms(self) -> int:
        return max(1, int(self._timeout_s * 1000))

    @property
    def _acquire_args(self) -> tuple[str | int, ...]:
        # A lease outlives an outage of half its timeout by a renewal at least; a longer one begins the looks anew.
        gap_ms = max(1, self._timeout_ms // 2)
        renewal_ms = int((self._renewal_s + RETRY_CAP_S) * 1000)
        return self._holder, self._timeout_ms, gap_ms, renewal_ms, self._uid, self._newest_epoch()

    def _renewed(self) -> bool:
        return bool(self._call(self._renew, self._holder, self._timeout_ms, self.epoch, self._uid))

    def _call(self, script: Any, *args: str | int) -> Any:
        try:
            return script(keys=self._keys, args=args)
        except (redis_errors.ConnectionError, redis_errors.TimeoutError) as error:
            raise retryable(error) from error

    def _keep(self) -> None:
        while not self._stop.wait(self._renewal_s):
            asked_at = time.monotonic()
            try:
                renewed = self._renewed()
            except (RetryableError, redis_errors.RedisError) as error:
                # For example a restart of Redis: no other learner can take the lease while Redis is down, or right after its
                # return, so this one continues; likewise where another program answers at Redis' port.
                logger.warning("the lease could not be renewed: %s", error)
                continue
            if not renewed:
                logger.error("another learner has taken the run from epoch %s", self._epoch)
                self._lost.set()
                if self._on_lost is not None:
                    self._on_lost()
                return
            self._valid_until = asked_at + self._timeout_s

    def _bell_position(self) -> str:
        try:
            entries = cast(list[Any], self._redis.xrevrange(self._bell, count=1))
        except (redis_errors.ConnectionError, redis_errors.TimeoutError) as error:
            raise retryable(error) from error
        return entries[0][0].decode() if entries else "0-0"

    def _wait_for_release(self, position: str, timeout_s: float) -> None:
        try:
            self._redis.xread({self._bell: position}, count=1, block=max(1, int(timeout_s * 1000)))
        except (redis_errors.ConnectionError, redis_errors.TimeoutError) as error:
            raise retryable(error) from error
