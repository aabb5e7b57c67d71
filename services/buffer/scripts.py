"""Lua scripts of the buffer, one atomic command each; a file's header is its contract."""

import asyncio
import hashlib
from collections import deque
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import msgpack
from redis import Redis
from redis import exceptions as redis_errors
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.errors import BufferError, FencedError, ForeignRunError, MeshError, ReconcileError
from offbeat.services.keys import RunKeys
from offbeat.services.messages.types import Group, Trajectory
from offbeat.services.redis.errors import retryable
from offbeat.services.redis.incarnation import ANY

Argument = str | bytes | int | float

FOLDER = Path(__file__).parent / "lua"
SHARED = ("prelude", "admission", "sweep")
REDIS_ERRORS = (redis_errors.ConnectionError, redis_errors.TimeoutError, redis_errors.ResponseError)
ERRORS: dict[str, type[MeshError]] = {
    "FENCED ": FencedError,
    "FOREIGN ": ForeignRunError,
    "RECONCILE ": ReconcileError,
}
MAX_CALLS_PER_TRIP = 32
MAX_TRIP_BYTES = 1 << 19
"""Limit of a round trip."""
MAX_ROUND_TRIPS = 2
"""One is prepared while Redis runs another."""


def group_id_of(run_id: str, number: int) -> str:
    return f"{run_id}-{number}"


def build_group(
    run_id: str, number: int, entry_id: bytes, version: int, temperature: bytes, trajectories: Sequence[Trajectory]
) -> Group:
    """Build a complete group from its stream entry. version: at admission; temperature: of its sampling; empty for rows."""
    first = trajectories[0]
    return Group(
        entry_id.decode(),
        group_id_of(run_id, number),
        number,
        first.tag,
        first.seed,
        version,
        tuple(trajectory for trajectory in trajectories if not trajectory.baseline),
        float(temperature) if temperature else None,
        tuple(trajectory for trajectory in trajectories if trajectory.baseline),
    )


@cache
def script_source(name: str) -> str:
    return "\n".join((FOLDER / f"{part}.lua").read_text() for part in (*SHARED, name))


@cache
def script_digest(name: str) -> str:
    return hashlib.sha1(script_source(name).encode(), usedforsecurity=False).hexdigest()


@contextmanager
def translate_errors() -> Iterator[None]:
    """Translate Redis' errors.

    Raises:
        RetryableError: Redis is unreachable, loading or read-only; repeatable.
        FencedError: a newer learner holds the run.
        ForeignRunError: the run was created anew under this name.
        ReconcileError: the caller knows another incarnation of the run's data.
        BufferError: the command was rejected.
    """
    try:
        yield
    except REDIS_ERRORS as error:
        raise _translate(error) from error


def _translate(error: Exception) -> MeshError:
    if not isinstance(error, redis_errors.ResponseError):
        return retryable(error)
    # Redis 7 puts ERR before a code of our own, 6 does not.
    text = str(error).removeprefix("ERR ")
    for code, kind in ERRORS.items():
        if text.startswith(code):
            return kind(text.removeprefix(code))
    return BufferError(text)


class BufferKeys:
    """Key names; see prelude.lua."""

    def __init__(self, run_id: str) -> None:
        run = RunKeys(run_id)
        self.root = run.key("buffer")
        self.stream = f"{self.root}:stream"
        self.limits = f"{self.root}:limits"
        self.life = f"{self.root}:life"
        self.scored = f"{self.root}:scored"
        self.quarantine = f"{self.root}:quarantine"
        self.doorbell = run.doorbell
        self.script_keys = [
            self.root,
            run.progress,
            run.epoch,
            run.doorbell,
            run.changes,
            run.adopted,
            run.record,
            run.history,
            run.incarnation,
            run.manifests,
            run.metrics,
        ]

    def bell(self, worker_id: str) -> str:
        return f"{self.root}:bell:{worker_id}"


class BufferScripts:
    def __init__(self, redis: Redis, run_id: str) -> None:
        self._keys = BufferKeys(run_id).script_keys
        self._script = cache(lambda name: redis.register_script(script_source(name)))

    def __call__(self, name: str, *args: Argument, incarnation: str = ANY) -> Any:
        """Run a script; raises as `translate_errors`.

        incarnation: known to the caller; `ANY` for the run's owner and readers.
        """
        with translate_errors():
            return self._script(name)(keys=self._keys, args=[*args, incarnation])


class AsyncBufferScripts:
    """Async `BufferScripts`; concurrent calls share a round trip."""

    def __init__(self, redis: AsyncRedis, run_id: str, *, max_round_trips: int = MAX_ROUND_TRIPS) -> None:
        self._redis = redis
        self._max_round_trips = max_round_trips
        self._keys = BufferKeys(run_id).script_keys
        self._queue: deque[_Call] = deque()
        self._senders: set[asyncio.Task[None]] = set()

    async def __call__(self, name: str, *args: Argument, incarnation: str = ANY) -> Any:
        return await self._enqueue(_Call(name, args, None, incarnation, asyncio.get_running_loop().create_future()))

    async def call_merged(
        self,
        name: str,
        shared: tuple[Argument, ...],
        item: tuple[Argument, ...],
        size: int = 0,
        *,
        incarnation: str = ANY,
    ) -> Any:
        """Run a script, merged with concurrent calls of equal `name`, `shared` and `incarnation`.

        The script maps a msgpack list of items to one of results. size: bytes of `item`.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        return await self._enqueue(_Call(name, shared, item, incarnation, answer, size))

    def _enqueue(self, call: "_Call") -> Awaitable[Any]:
        self._queue.append(call)
        if len(self._senders) < self._max_round_trips:
            sender = asyncio.create_task(self._send())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)  # if it is cancelled before it starts
        return call.answer

    async def _send(self) -> None:
        try:
            await self._send_all()
        finally:  # before a caller resumes: its next call must not rely on a sender that has left the loop
            self._senders.discard(cast(asyncio.Task[None], asyncio.current_task()))

    async def _send_all(self) -> None:
        while self._queue:
            calls = self._next_calls()
            commands = _merge_calls(calls)
            try:
                replies = await self._execute(commands) if commands else []
            except BaseException as error:
                # Propagate to all callers, also cancellation.
                _fail(calls, error)
                if not isinstance(error, Exception):
                    _fail(self._queue, error)
                    raise
                continue
            for command, reply in zip(commands, replies, strict=True):
                command.settle(reply)

    def _next_calls(self) -> list["_Call"]:
        calls: list[_Call] = []
        size = 0
        while self._queue and len(calls) < MAX_CALLS_PER_TRIP and size < MAX_TRIP_BYTES:
            call = self._queue.popleft()
            if not call.answer.done():  # its caller may have been cancelled
                calls.append(call)
                size += call.size
        return calls

    async def _execute(self, commands: Sequence["_Command"]) -> list[Any]:
        lines = [(len(self._keys), *self._keys, *command.arguments) for command in commands]
        async with self._redis.pipeline(transaction=False) as pipe:
            for command, arguments in zip(commands, lines, strict=True):
                pipe.evalsha(script_digest(command.name), *arguments)
            replies = await pipe.execute(raise_on_error=False)
        for i, reply in enumerate(replies):
            if isinstance(reply, redis_errors.NoScriptError):  # a new Redis, or one that lost its scripts
                replies[i] = await self._eval_source(commands[i].name, lines[i])
        return replies

    async def _eval_source(self, name: str, arguments: tuple[Any, ...]) -> Any:
        try:
            return await cast(Awaitable[Any], self._redis.eval(script_source(name), *arguments))
        except redis_errors.ResponseError as error:
            return error


@dataclass(slots=True, eq=False)
class _Call:
    name: str
    shared: tuple[Argument, ...]
    item: tuple[Argument, ...] | None
    """None: not mergeable."""
    incarnation: str
    answer: asyncio.Future[Any]
    size: int = 0

    def can_merge_with(self, other: "_Call") -> bool:
        if self.item is None or other.item is None:
            return False
        mine, others = (self.name, self.shared, self.incarnation), (other.name, other.shared, other.incarnation)
        return mine == others

    def settle(self, reply: Any) -> None:
        if self.answer.done():
            return
        if not isinstance(reply, Exception):
            self.answer.set_result(reply)
            return
        error = reply
        if isinstance(reply, REDIS_ERRORS):
            error = _translate(reply)
            error.__cause__ = reply
        self.answer.set_exception(error)


@dataclass(slots=True, eq=False)
class _Command:
    calls: list[_Call]

    @property
    def name(self) -> str:
        return self.calls[0].name

    @property
    def arguments(self) -> tuple[Argument, ...]:
        first = self.calls[0]
        if first.item is None:
            return *first.shared, first.incarnation
        # One argument for all: redis-py takes five times as long to pack four per call.
        items = cast(bytes, msgpack.packb([call.item for call in self.calls], use_bin_type=False))
        return *first.shared, items, first.incarnation

    def settle(self, reply: Any) -> None:
        if isinstance(reply, Exception) or self.calls[0].item is None:
            parts = [reply] * len(self.calls)
        else:
            parts = cast(list[Any], msgpack.unpackb(reply))
        for call, part in zip(self.calls, parts, strict=True):
            call.settle(part)


def _merge_calls(calls: Iterable[_Call]) -> list[_Command]:
    commands: list[_Command] = []
    for call in calls:
        if commands and call.can_merge_with(commands[-1].calls[0]):
            commands[-1].calls.append(call)
        else:
            commands.append(_Command([call]))
    return commands


def _fail(calls: Iterable[_Call], error: BaseException) -> None:
    for call in calls:
        if isinstance(error, Exception):
            call.settle(error)
        else:
            call.answer.cancel()
