"""Env workers' buffer client.

Commands are repeatable: claims carry a nonce, submits are idempotent by member, cancellations derive from claims. Each
carries the data's incarnation; after a change, the client first joins the new one.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import msgpack
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.buffer.api import ClaimLimits, GroupSamples, SubmitResult, WorkerOrders
from offbeat.services.buffer.members import Addition, encode_addition
from offbeat.services.buffer.scripts import (
    Argument,
    AsyncBufferScripts,
    BufferKeys,
    group_id_of,
    translate_errors,
)
from offbeat.services.errors import BufferError, ReconcileError
from offbeat.services.messages.codec import encode_trajectory
from offbeat.services.messages.types import EpisodeKind, EpisodeTask, Trajectory
from offbeat.services.redis.connection import MAX_BLOCK_S

MAX_REASON_CHARS = 64


def unit_name(kind: EpisodeKind, group_id: str, number: int) -> str:
    return f"t:{number}" if kind is EpisodeKind.TRAIN else f"e:{group_id}"


class AsyncRolloutBuffer:
    """`RolloutBuffer` on Redis; a second one of the same worker id reassigns the first's episodes.

    Methods raise RetryableError while Redis does not answer (repeatable).
    """

    def __init__(self, redis: AsyncRedis, run_id: str, run_uid: str = "") -> None:
        self._redis = redis
        self._run_uid = run_uid
        self._run_id = run_id
        self._run = AsyncBufferScripts(redis, run_id)
        self._keys = BufferKeys(run_id)
        self._session = uuid.uuid4().hex[:12]
        self._claim_lock = asyncio.Lock()
        self._nonces: dict[str, int] = {}
        self._positions: dict[str, dict[str, str]] = {}
        """Worker -> stream that wakes it -> last entry that it knows."""
        self._active: dict[str, dict[str, EpisodeTask]] = {}
        self._submitting: dict[str, dict[str, EpisodeTask]] = {}
        self._incarnation = ""
        self._join_lock = asyncio.Lock()

    async def claim(self, worker_id: str, limit: int, of_kind: ClaimLimits | None = None) -> list[EpisodeTask]:
        """Claim episodes; after a lost reply the same ones, even beyond `limit`."""
        async with self._claim_lock:
            nonce = self._nonces.setdefault(worker_id, 0)
            limits = (limit, *(of_kind or ClaimLimits(limit, limit)))
            position, packed = await self._call(worker_id, "claim", worker_id, self._session, nonce, *limits)
            self._nonces[worker_id] += 1
        self._positions_of(worker_id)[self._keys.doorbell] = position.decode()
        tasks = [self._task(*row) for row in msgpack.unpackb(packed)] if packed else []
        self._active.setdefault(worker_id, {}).update((_token(task), task) for task in tasks)
        return tasks

    async def wait_for_work(self, worker_id: str, timeout_s: float) -> bool:
        positions = self._positions_of(worker_id)
        block_ms = max(1, int(min(timeout_s, MAX_BLOCK_S) * 1000))
        with translate_errors():
            streams = cast(list[Any], await self._redis.xread(cast(Any, positions), block=block_ms) or [])
        positions.update((name.decode(), entries[-1][0].decode()) for name, entries in streams)
        return bool(streams)

    async def heartbeat(self, worker_id: str) -> WorkerOrders:
        """Record a heartbeat; its episodes are named only if their number is not that of the worker's claims."""
        draining, claimed, *cancelled = await self._send_heartbeat(worker_id, {})
        active = dict(self._active.get(worker_id, {}))
        if active and claimed != len(active):  # or claims and submits are under way
            draining, _, *cancelled = await self._send_heartbeat(worker_id, active)
        current = self._active.get(worker_id, {})
        tokens = [token for raw in cancelled if current.get(token := raw.decode()) is active[token]]
        return WorkerOrders(cancelled=tuple(current.pop(token) for token in tokens), draining=bool(draining))

    async def _send_heartbeat(self, worker_id: str, named: Mapping[str, EpisodeTask]) -> Any:
        parts = (list(named), [task.attempt for task in named.values()]) if named else ()
        packed = [cast(bytes, msgpack.packb(part)) for part in parts] or ["", ""]
        return await self._call(worker_id, "heartbeat", worker_id, self._session, *packed)

    async def submit(
        self, worker_id: str, task: EpisodeTask, trajectory: Trajectory, sample: bytes = b""
    ) -> SubmitResult:
        """Raises:
        CodecError: the trajectory violates an invariant of `services.messages.types`; fail the episode.
        BufferError: the trajectory belongs to another task.
        """
        if (trajectory.group_id, trajectory.index) != (task.group_id, task.index):
            submitted = f"{trajectory.group_id}/{trajectory.index}"
            raise BufferError(f"{submitted} does not belong to task {task.group_id}/{task.index}")
        blob = encode_trajectory(trajectory)
        versions = trajectory.version_range()
        unit = unit_name(task.kind, task.group_id, task.number)
        item, size = (unit, task.index, versions[0] if versions else "", blob, sample), len(blob) + len(sample)
        with self._as_submitting(worker_id, task):
            return SubmitResult(
                await self._joined(
                    worker_id,
                    lambda incarnation: self._run.call_merged(
                        "submit", (worker_id,), item, size, incarnation=incarnation
                    ),
                )
            )

    async def samples(self, worker_id: str, task: EpisodeTask) -> GroupSamples:
        packed = await self._call(worker_id, "samples", unit_name(task.kind, task.group_id, task.number))
        reply: list[Any] = msgpack.unpackb(packed, raw=True)
        if not reply:
            return GroupSamples()
        return GroupSamples(reply[0].decode(), dict(zip(reply[1::2], reply[2::2], strict=True)))

    async def score_group(
        self, worker_id: str, task: EpisodeTask, additions: Mapping[int, Addition], mark: str
    ) -> SubmitResult:
        unit = unit_name(task.kind, task.group_id, task.number)
        flat = [part for index, each in additions.items() for part in (index, encode_addition(each))]
        packed = cast(bytes, msgpack.packb(flat, use_bin_type=False))
        with self._as_submitting(worker_id, task):
            reply = await self._call(worker_id, "score_group", worker_id, unit, task.index, packed, mark)
        return SubmitResult(reply.decode())

    @contextmanager
    def _as_submitting(self, worker_id: str, task: EpisodeTask) -> Iterator[None]:
        """Hold a task that a heartbeat must not cancel any more."""
        self._forget(worker_id, task)
        submitting, token = self._submitting.setdefault(worker_id, {}), _token(task)
        submitting[token] = task
        try:
            yield
        finally:
            submitting.pop(token, None)

    async def fail(self, worker_id: str, task: EpisodeTask, reason: str) -> None:
        """Report a failure, counted by `reason`."""
        unit = unit_name(task.kind, task.group_id, task.number)
        reason = reason[:MAX_REASON_CHARS] or "unknown"
        await self._call(worker_id, "fail", worker_id, unit, task.index, task.attempt, reason)
        self._forget(worker_id, task)

    async def task(self, number: int, drawn: str = "") -> tuple[str, str]:
        task, state = await self._call("", "task", number, drawn)
        return task.decode(), state.decode()

    async def release(self, worker_id: str) -> int:
        count = int(await self._call(worker_id, "release", worker_id))
        self._active.pop(worker_id, None)
        return count

    async def _call(self, worker_id: str, name: str, *args: Argument) -> Any:
        return await self._joined(worker_id, lambda incarnation: self._run(name, *args, incarnation=incarnation))

    async def _joined(self, worker_id: str, call: Callable[[str], Awaitable[Any]]) -> Any:
        """Call with the incarnation, after joining a new one."""
        while True:
            known = self._incarnation or await self._join(worker_id, "")
            try:
                return await call(known)
            except ReconcileError:
                await self._join(worker_id, known)

    async def _join(self, worker_id: str, known: str) -> str:
        """Join the incarnation after `known`, with each worker's episodes."""
        async with self._join_lock:
            if self._incarnation == known:
                incarnation = ""
                for name in {worker_id, *self._active, *self._submitting} - {""}:
                    incarnation = await self._join_as(name)
                self._incarnation = incarnation or await self._join_as("")
            return self._incarnation

    async def _join_as(self, worker_id: str) -> str:
        held = {**self._active.get(worker_id, {}), **self._submitting.get(worker_id, {})}
        rows = [(token, task.attempt, task.min_version) for token, task in held.items()]
        nonce = self._nonces.get(worker_id, 0)
        packed = cast(bytes, msgpack.packb(rows))
        reply = await self._run("join", worker_id, self._session, nonce, self._run_uid, packed)
        if reply is None:
            raise ReconcileError(
                "Redis was restarted or replaced, and may have lost data: waiting for a learner to reconcile it"
            )
        return str(reply.decode())

    def _task(
        self, unit: str, index: int, attempt: int, min_version: int, sampling: str, temperature: str
    ) -> EpisodeTask:
        kind, _, name = unit.partition(":")
        train = kind == "t"
        return EpisodeTask(
            kind=EpisodeKind.TRAIN if train else EpisodeKind.EVAL,
            group_id=group_id_of(self._run_id, int(name)) if train else name,
            number=int(name) if train else index,
            index=index,
            attempt=attempt,
            min_version=min_version,
            sampling_name=sampling,
            temperature=float(temperature) if temperature else None,
        )

    def _forget(self, worker_id: str, task: EpisodeTask) -> None:
        current, token = self._active.get(worker_id, {}), _token(task)
        if current.get(token) == task:
            del current[token]

    def _positions_of(self, worker_id: str) -> dict[str, str]:
        streams = (self._keys.doorbell, self._keys.bell(worker_id))
        return self._positions.setdefault(worker_id, dict.fromkeys(streams, "0-0"))


def _token(task: EpisodeTask) -> str:
    return f"{unit_name(task.kind, task.group_id, task.number)}:{task.index}"
