"""Single writes of a run's parts.

Invariants: a late write of a run since deleted or created anew has no effect, and is logged once; a write by `once`
or `once_by_name` has its effect once, even if connection or caller repeat it after a lost reply.
"""

import asyncio
import logging
import threading
import uuid
from typing import Any, cast

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.keys import RunKeys

logger = logging.getLogger(__name__)

_WRITE = """
-- KEYS: record, epoch, key to write, writers. ARGV: uid of the caller's run, epoch that it holds (empty: any), writer,
-- number of the write (0: may be repeated), command, argument, ...
-- Returns 1, or 0: the record is another run's or, unless the caller knows of none, gone; or a newer learner holds the run.
if (redis.call('HGET', KEYS[1], 'uid') or '') ~= ARGV[1] then return 0 end
if ARGV[2] ~= '' and redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
local number = tonumber(ARGV[4])
if number > 0 and number <= tonumber(redis.call('HGET', KEYS[4], ARGV[3]) or 0) then return 1 end
redis.call(ARGV[5], KEYS[3], unpack(ARGV, 6))
if number > 0 then redis.call('HSET', KEYS[4], ARGV[3], number) end
"""


class _Refusals:
    def __init__(self, run_id: str, uid: str) -> None:
        self._keys = RunKeys(run_id)
        self._uid = uid
        self._warned = False
        self._writer = uuid.uuid4().hex
        self._number = 0
        self._unanswered: tuple[Any, ...] | None = None
        """Numbered write without an answer: its caller may repeat it."""
        self.epoch: int | None = None
        """Epoch required of the writer's lease; None: any."""

    def _keys_of(self, key: str) -> list[str]:
        return [self._keys.record, self._keys.epoch, key, self._keys.writers]

    def _arguments(self, command: str, arguments: tuple[Any, ...], number: int = 0) -> list[Any]:
        return [self._uid, "" if self.epoch is None else self.epoch, self._writer, number, command, *arguments]

    def _numbered(self, command: str, arguments: tuple[Any, ...]) -> list[Any]:
        if arguments != self._unanswered:
            self._number, self._unanswered = self._number + 1, arguments
        return self._arguments(command, arguments, self._number)

    def _note(self, accepted: object) -> bool:
        if not accepted and not self._warned:
            self._warned = True
            logger.warning(
                "run %s was deleted or created anew, or its record is lost: writes are dropped", self._keys.run_id
            )
        return bool(accepted)


class RunWrites(_Refusals):
    """Synchronous writes. uid: empty for a run without a record. after: Lua that follows each write, to `KEYS[3]`."""

    def __init__(self, redis: Redis, run_id: str, uid: str = "", after: str = "") -> None:
        super().__init__(run_id, uid)
        self._script = redis.register_script(f"{_WRITE}{after}return 1\n")
        self._lock = threading.Lock()
        """Held while a numbered write is sent: a later number would overtake it."""

    def __call__(self, command: str, key: str, *arguments: Any) -> bool:
        return self._note(self._script(keys=self._keys_of(key), args=self._arguments(command, arguments)))

    def once(self, command: str, key: str, *arguments: Any) -> bool:
        """Write with a command that is not idempotent."""
        with self._lock:
            accepted = self._script(keys=self._keys_of(key), args=self._numbered(command, arguments))
            self._unanswered = None
        return self._note(accepted)

    def once_by_name(self, name: str, command: str, key: str, *arguments: Any) -> bool:
        """Write unless a write of this name, by any process, was accepted before."""
        args = [self._uid, "" if self.epoch is None else self.epoch, name, 1, command, *arguments]
        return self._note(self._script(keys=self._keys_of(key), args=args))

    def forget_name(self, name: str) -> None:
        """Accept a write of this name again."""
        self("HDEL", self._keys.writers, name)


class AsyncRunWrites(_Refusals):
    """Asynchronous `RunWrites`."""

    def __init__(self, redis: AsyncRedis, run_id: str, uid: str = "", after: str = "") -> None:
        super().__init__(run_id, uid)
        self._script = redis.register_script(f"{_WRITE}{after}return 1\n")
        self._lock = asyncio.Lock()

    async def __call__(self, command: str, key: str, *arguments: Any) -> bool:
        args = self._arguments(command, arguments)
        return self._note(await cast(Any, self._script(keys=self._keys_of(key), args=args)))

    async def once(self, command: str, key: str, *arguments: Any) -> bool:
        async with self._lock:
            args = self._numbered(command, arguments)
            accepted = await cast(Any, self._script(keys=self._keys_of(key), args=args))
            self._unanswered = None
        return self._note(accepted)
