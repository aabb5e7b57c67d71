"""Turns of learner and engines on devices that both use.

Invariants: the learner loads its states once every engine there sleeps or is dead; an engine starts or wakes in no turn of
the learner. A turn ends with its learner's lease, at the latest.
"""

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol, cast

from redis import Redis
from redis import exceptions as redis_errors

from offbeat.services.errors import FencedError, RetryableError
from offbeat.services.keys import RunKeys
from offbeat.services.redis.errors import complaint, retryable

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
DEAD_AFTER_S = 10.0
"""Time without a report after which an engine's process counts as dead."""
UNLIMITED_MS = 2**53
WAIT_SLICE_S = 0.5
"""Longest blocking read of a learner that waits."""
RETRY_INTERVAL_S = 0.5
FENCED = -1
"""Reply of `_BEGIN`."""
NO_TURN = ""

_BEGIN = """
-- KEYS: record, epoch, turn, engines, bell. ARGV: uid, epoch of the learner, id of the turn, ms until a silent engine is
-- dead, ms that a missing lease is tolerated. Returns -1: the learner is fenced off, or the engines that are awake.
if (redis.call('HGET', KEYS[1], 'uid') or '') ~= ARGV[1] or redis.call('GET', KEYS[2]) ~= ARGV[2] then return -1 end
if redis.call('HGET', KEYS[3], 'id') ~= ARGV[3] then
  redis.call('HSET', KEYS[3], 'id', ARGV[3], 'epoch', ARGV[2], 'grace_ms', ARGV[5])
  redis.call('XADD', KEYS[5], 'MAXLEN', '~', 16, '*', 'begin', ARGV[3])
end
local time, awake, engines = redis.call('TIME'), {}, redis.call('HGETALL', KEYS[4])
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i = 1, #engines, 2 do
  local at, asleep = string.match(engines[i + 1], '^(%d+) (.*)$')
  if now - at > tonumber(ARGV[4]) then redis.call('HDEL', KEYS[4], engines[i])
  elseif asleep ~= ARGV[3] then awake[#awake + 1] = engines[i] end
end
return awake
"""

_END = """
-- KEYS: turn, bell. ARGV: id of the turn.
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 16, '*', 'end', ARGV[1])
return 1
"""

_REPORT = """
-- KEYS: record, epoch, turn, engines, bell, lease. ARGV: uid, engine, turn in which it sleeps (empty: it is awake).
-- Returns {id of the turn or '', whether its learner has a lease, ms that a missing one is tolerated}.
if (redis.call('HGET', KEYS[1], 'uid') or '') ~= ARGV[1] then return {'', 0, 0} end
local time = redis.call('TIME')
local before = redis.call('HGET', KEYS[4], ARGV[2]) or ''
redis.call('HSET', KEYS[4], ARGV[2], string.format('%.0f %s', time[1] * 1000 + math.floor(time[2] / 1000), ARGV[3]))
if string.match(before, ' (.*)$') ~= ARGV[3] then
  redis.call('XADD', KEYS[5], 'MAXLEN', '~', 16, '*', 'asleep', ARGV[3])
end
local turn = redis.call('HMGET', KEYS[3], 'id', 'epoch', 'grace_ms')
if not turn[1] or turn[2] ~= redis.call('GET', KEYS[2]) then return {'', 0, 0} end
return {turn[1], redis.call('EXISTS', KEYS[6]), tonumber(turn[3])}
"""


class LearnerTurns:
    """The learner's end."""

    def __init__(self, redis: Redis, run_id: str, uid: str, epoch: int, lease_s: float) -> None:
        """lease_s: expiry of the learner's lease."""
        keys = RunKeys(run_id)
        self._redis = redis
        self._uid = uid
        self._epoch = epoch
        self._grace_ms = int(lease_s * 500)  # a lease that outlived an outage of Redis is renewed before
        self._keys = [keys.record, keys.epoch, keys.turn, keys.sharing_engines, keys.turn_bell]
        self._begin = redis.register_script(_BEGIN)
        self._end = redis.register_script(_END)
        self._id = NO_TURN

    @property
    def is_held(self) -> bool:
        return self._id != NO_TURN

    def begin(self, should_stop: Callable[[], bool]) -> bool:
        """Return True once no engine is awake on the devices; False if stopped before.

        Raises:
            FencedError: another learner has taken the run.
        """
        turn = uuid.uuid4().hex
        bell, began = self._keys[-1], time.monotonic()
        position = _last_entry(self._redis, bell)
        # An engine is not dead because Redis did not answer it: it has the same time to report as this learner waits
        while awake := self._awake(turn, knows_dead=time.monotonic() > began + DEAD_AFTER_S):
            if should_stop():
                self._end(keys=[self._keys[2], bell], args=[turn])
                return False
            logger.debug("waiting until %d engine(s) sleep", len(awake))
            entries = cast(list[Any], self._redis.xread({bell: position}, block=int(WAIT_SLICE_S * 1000)))
            position = entries[0][1][-1][0] if entries else position
        self._id = turn
        return True

    def _awake(self, turn: str, *, knows_dead: bool) -> list[bytes]:
        dead_ms = int(DEAD_AFTER_S * 1000) if knows_dead else UNLIMITED_MS
        arguments = [self._uid, self._epoch, turn, dead_ms, self._grace_ms]
        reply = cast(Any, self._begin(keys=self._keys, args=arguments))
        if reply == FENCED:
            raise FencedError(f"another learner has taken the run from epoch {self._epoch}")
        return reply

    def end(self) -> None:
        """Give the devices to the engines, if held."""
        turn, self._id = self._id, NO_TURN
        if turn:
            self._end(keys=[self._keys[2], self._keys[-1]], args=[turn])


class Sleeper(Protocol):
    async def sleep(self) -> None:
        """Return running requests and leave the devices."""
        ...

    async def wake(self) -> None: ...


class EngineTurns:
    """The end of an engine's process: a thread reports and watches, as starting an engine blocks the event loop."""

    def __init__(self, redis: Redis, run_id: str, uid: str, engine: str) -> None:
        """redis: a connection that may block."""
        keys = RunKeys(run_id)
        self._redis = redis
        self._uid = uid
        self._engine = engine
        self._bell = keys.turn_bell
        self._keys = [keys.record, keys.epoch, keys.turn, keys.sharing_engines, keys.turn_bell, keys.lease]
        self._report = redis.register_script(_REPORT)
        self._state = NO_TURN
        """Turn in which the engine sleeps."""
        self._turn = NO_TURN
        """The learner's turn, as last seen."""
        self._lease_missing_since: float | None = None
        self._telling = threading.Lock()
        self._stopped = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._thread = threading.Thread(target=self._watch, name="device-turns", daemon=True)

    async def acquire(self) -> None:
        """Return once the devices are the engine's: in no turn of the learner."""
        if self._thread.ident is None:
            self._thread.start()
        while turn := await self._tell(NO_TURN):
            await self._tell(turn)
            await self._wait(lambda turn=turn: self._turn != turn)

    async def take(self, engine: Sleeper) -> None:
        """Send the engine to sleep in each turn of the learner, until cancelled."""
        while True:
            await self._wait(lambda: self._turn != NO_TURN)
            turn = self._turn
            await engine.sleep()
            await self._tell(turn)
            await self._wait(lambda turn=turn: self._turn != turn)
            await self.acquire()
            await engine.wake()

    async def stop(self) -> None:
        self._stopped.set()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    async def _tell(self, state: str) -> str:
        """Report the engine's state; return the learner's turn."""
        self._state = state
        while True:
            try:
                return await asyncio.to_thread(self._exchange)
            except RetryableError as error:
                logger.warning("the engine's turn is unknown: %s", error)
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def _wait(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            if not condition():
                await self._changed.wait()

    def _exchange(self) -> str:
        with self._telling:
            try:
                reply = cast(Any, self._report(keys=self._keys, args=[self._uid, self._engine, self._state]))
            except (redis_errors.ConnectionError, redis_errors.TimeoutError) as error:
                raise retryable(error) from error
            turn = self._in_force(reply[0].decode(), has_lease=bool(reply[1]), grace_s=reply[2] / 1000)
            if turn != self._turn:
                self._turn = turn
                self._loop.call_soon_threadsafe(self._changed.set)
            return turn

    def _in_force(self, turn: str, *, has_lease: bool, grace_s: float) -> str:
        """Return the turn, unless its learner has had no lease for `grace_s` in which Redis answered."""
        if has_lease or not turn:
            self._lease_missing_since = None
            return turn
        now = time.monotonic()
        if self._lease_missing_since is None:
            self._lease_missing_since = now
        return turn if now - self._lease_missing_since < grace_s else NO_TURN

    def _watch(self) -> None:
        position = b"$"
        while not self._stopped.is_set():
            try:
                if position == b"$":
                    position = _last_entry(self._redis, self._bell)
                self._exchange()
                block_ms = int(REPORT_INTERVAL_S * 1000)
                entries = cast(list[Any], self._redis.xread({self._bell: position}, block=block_ms))
                position = entries[0][1][-1][0] if entries else position
            except RetryableError as error:
                self._stopped.wait(RETRY_INTERVAL_S)
                logger.warning("the learner's turn is unknown: %s", error)
            except (redis_errors.ConnectionError, redis_errors.TimeoutError) as error:
                self._stopped.wait(RETRY_INTERVAL_S)
                logger.warning("the learner's turn is unknown: %s", complaint(error))


def _last_entry(redis: Redis, stream: str) -> bytes:
    entries = cast(list[Any], redis.xrevrange(stream, count=1))
    return entries[0][0] if entries else b"0-0"
