"""Buffer operations of the run's owner and the control service."""

import secrets
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

import msgpack
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.buffer.api import (
    Admission,
    BufferLimits,
    Counters,
    GroupProgress,
    Quarantined,
    Snapshot,
    WorkerState,
)
from offbeat.services.buffer.scripts import (
    AsyncBufferScripts,
    BufferKeys,
    BufferScripts,
    translate_errors,
)


def configure_buffer(redis: Redis, run_id: str, limits: BufferLimits, uid: str = "") -> None:
    """Write a run's limits before the first claim; idempotent.

    Raises:
        BufferError: the run has groups of another `group_size` or `groups_per_step`.
        RetryableError: Redis does not answer.
    """
    BufferScripts(redis, run_id)("configure", uid, secrets.token_hex(4), *limit_fields(limits))


def limit_fields(limits: BufferLimits) -> list[str | int | float]:
    return [part for name, value in asdict(limits).items() if value is not None for part in (name, value)]


def release_all_workers(redis: Redis, run_id: str) -> int:
    """Requeue all episodes, attempts uncounted; return their number. No worker may be alive."""
    return int(BufferScripts(redis, run_id)("release"))


class BufferWatch:
    """Reader and pause of a run's buffer; raises RetryableError without Redis."""

    def __init__(self, redis: AsyncRedis, run_id: str) -> None:
        self._redis = redis
        self._keys = BufferKeys(run_id)
        self._run = AsyncBufferScripts(redis, run_id)

    async def snapshot(self) -> Snapshot:
        return snapshot_from(await self._run("snapshot"))

    async def counters(self) -> Counters:
        return (await self.snapshot()).counters

    async def set_paused(self, paused: bool) -> None:
        """Stop or resume claiming."""
        await self._run("pause", int(paused))

    async def groups(self, count: int = 1000) -> list[GroupProgress]:
        rows = await self._run("groups", count)
        return [GroupProgress(*map(int, counts), is_scoring=bool(scoring)) for *counts, scoring in rows]

    async def life(self, count: int = 1000) -> list[tuple[int, str, str]]:
        """Return the newest group events as (number, event, detail), oldest first."""
        with translate_errors():
            entries: list[Any] = await self._redis.xrevrange(self._keys.life, count=count)
        return [(int(f[b"n"]), f[b"e"].decode(), f[b"d"].decode()) for _, f in reversed(entries)]

    async def quarantine(self) -> list[Quarantined]:
        """Return undecodable trajectories, newest first."""
        with translate_errors():
            rows = cast(list[bytes], await cast(Any, self._redis.lrange(self._keys.quarantine, 0, -1)))
        entries = (msgpack.unpackb(row, raw=True) for row in rows)
        return [Quarantined(unit.decode(), index, complaint.decode(), blob) for unit, index, complaint, blob in entries]


def snapshot_from(reply: Sequence[Any]) -> Snapshot:
    ledger, progress = _decode_hash(reply[0]), _decode_hash(reply[2])
    playing, streamed, delivered, queued_train, queued_eval, quarantined = reply[3:9]
    clock, workers, epoch = float(reply[9]), reply[10], int(reply[11])
    counters = Counters(
        admitted=int(ledger.get("admitted", 0)),
        submitted=int(ledger.get("submitted", 0)),
        trained=int(ledger.get("trained", 0)),
        dropped=_count_by_reason(ledger, "dropped"),
        failed=_count_by_reason(ledger, "failed"),
        in_flight=playing + streamed,
        refilled=reply[13],
    )
    return Snapshot(
        counters=counters,
        playing=playing,
        ready=streamed - delivered,
        consumed=delivered,
        queued_train=queued_train,
        queued_eval=queued_eval,
        quarantined=quarantined,
        step=int(progress["step"]) if "step" in progress else None,
        epoch=epoch,
        admission=Admission(reply[12].decode()),
        workers=tuple(
            WorkerState(workers[i].decode(), max(0.0, clock - float(workers[i + 1])) / 1000, workers[i + 2])
            for i in range(0, len(workers), 3)
        ),
    )


def _count_by_reason(ledger: dict[str, str], outcome: str) -> dict[str, int]:
    return {name.partition(":")[2]: int(n) for name, n in ledger.items() if name.startswith(f"{outcome}:")}


def _decode_hash(flat: Sequence[bytes]) -> dict[str, str]:
    return {flat[i].decode(): flat[i + 1].decode() for i in range(0, len(flat), 2)}
