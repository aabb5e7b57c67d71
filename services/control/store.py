"""Run records in Redis.

Invariants: only the API writes `wanted`, only the reconciler `state`; a run id names at most one active run, sole
holder of its claims; its epoch never decreases.
"""

import fnmatch
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

from redis.asyncio import Redis

from offbeat.services.control.claims import KINDS, Claims, Holder, claims_of, find_conflict, without_run, write_claims
from offbeat.services.control.component_store import ComponentStore, write_event
from offbeat.services.control.recent_changes import EarlierChanges, RecentChanges, read_recent_changes
from offbeat.services.control.run import (
    BusyError,
    DesiredState,
    ForeignRecordError,
    LostRecordError,
    RunExistsError,
    RunRecord,
    RunSpec,
    RunState,
    RunStateError,
    UnknownRunError,
)
from offbeat.services.keys import RUNS, RunKeys, claims_key, slots_key, split_claim
from offbeat.services.live_settings import (
    Change,
    Settings,
    decode_change,
    encode_change,
)
from offbeat.services.redis.transactions import repeat_transaction

ORPHANED_AFTER_S = 30.0
"""Time without reconciliation after which a run is inactive."""
ATTEMPT_FIELDS = ("restarts", "components", "learner", "doing")
"""Fields cleared at each start."""
REPORT_DUE, REPORT_WRITTEN, REPORT_FAILED = "due", "written", "failed"
EPOCH_TTL_S = 7 * 24 * 3600
"""Retention of a deleted run's epoch; exceeds any learner's isolation."""


@dataclass(frozen=True, slots=True)
class RunStore:
    redis: Redis
    clock: Callable[[], float] = field(default=time.time)
    orphaned_after_s: float = ORPHANED_AFTER_S
    """Of the mesh's runs; infinite if this service alone reconciles them."""
    mesh: str = ""
    """Mesh of the runs that are created and reconciled; others may be in the same Redis."""
    attended: set[str] = field(default_factory=set[str])
    """Active runs whose records a reconciler of this process restores."""
    reported: set[str] = field(default_factory=set[str])
    """Folders into which this process writes an ended run's report."""
    _earlier: dict[str, EarlierChanges] = field(default_factory=dict[str, EarlierChanges])
    """By run."""

    @property
    def components(self) -> ComponentStore:
        return ComponentStore(self.redis, self.clock)

    @repeat_transaction
    async def create(self, spec: RunSpec, *, takeover: bool = False, is_fork: bool = False) -> tuple[RunRecord, bool]:
        """Record a run; return the record, and whether it is new. Idempotent.

        An ended run of that name is resumed if `spec.resume`, with its settings unless overridden; else deleted and its
        learners fenced. takeover: treat an active run as inactive. is_fork: of an ended run, resume only an equal one.

        Raises:
            RunExistsError: active with another configuration, or ending; for a fork, ended with another one, too.
            BusyError: another active run has claimed a resource.
        """
        keys, claimed = RunKeys(spec.run_id), claim_keys(spec)
        async with self.redis.pipeline() as pipe:
            await pipe.watch(keys.record, *claimed)
            raw = cast(dict[bytes, bytes], await pipe.hgetall(keys.record))  # pyright: ignore[reportGeneralTypeIssues]
            old = RunRecord.decode(raw) if raw else None
            if old and not takeover and self.is_active(old):
                if old.is_ending:
                    raise RunExistsError(
                        f"run {spec.run_id!r} is ending: start it again after its end (`offbeat runs watch "
                        f"{spec.run_id}`), or choose another name{self._hint(old)}"
                    )
                if (old.config, old.mesh) == (spec.config, self.mesh):
                    return old, False
                raise RunExistsError(
                    f"run {spec.run_id!r} is {old.state}: stop it first, or choose another name{self._hint(old)}"
                )
            if old and is_fork and old.config != spec.config:
                raise RunExistsError(
                    f"run {spec.run_id!r} exists, with another configuration: choose another exp_name, delete that run "
                    f"with its files (`offbeat runs delete {spec.run_id} --files`), or resume it (`offbeat runs start "
                    f"{old.output_dir}/config.yaml`)"
                )
            claims = await self.find_claims(spec)
            record = self._new(spec, old if spec.resume else None)
            stale = [] if spec.resume else await self._keys_of(spec.run_id)
            pipe.multi()
            if stale:
                pipe.delete(*stale)
            if not spec.resume:
                pipe.incr(keys.epoch)
            pipe.persist(keys.epoch)  # a deleted run's expires
            pipe.delete(keys.record, *(keys.key(name) for name in ATTEMPT_FIELDS))
            pipe.hset(keys.record, mapping=cast(dict[Any, Any], record.encode()))
            pipe.zadd(RUNS, {spec.run_id: record.created_at})
            write_claims(pipe, claims)
            if spec.resume and old and (values := _differences(old.settings, spec.settings)):
                pipe.rpush(keys.changes, encode_change(values, self.clock()))
            write_event(pipe, spec.run_id, "created", {"attempt": record.attempt})
            await pipe.execute()
            return record, True

    async def find_claims(self, spec: RunSpec) -> Claims:
        """Return the claims to write for a start; raises `BusyError` if active runs leave no room for it."""
        others: dict[str, list[Holder]] = {}
        held: dict[str, dict[str, list[str]]] = {}
        for kind, name in spec.claims.items():
            held[kind] = await self._claims(kind)
            slots = await cast(Any, self.redis.hget(slots_key(kind), name))
            others[kind] = await self._holders(run for run in held[kind].get(name, ()) if run != spec.run_id)
            if conflict := find_conflict(kind, name, others[kind], slots=int(slots or 1), base=spec.base):
                raise BusyError(conflict, kind)
        return claims_of(spec, others, held)

    async def _claims(self, kind: str) -> dict[str, list[str]]:
        raw: dict[bytes, bytes] = await cast(Any, self.redis.hgetall(claims_key(kind)))
        return {each.decode(): split_claim(claim) for each, claim in raw.items()}

    async def _holders(self, run_ids: Iterable[str]) -> list[Holder]:
        """Return those that are active."""
        raw = [(run_id, await cast(Any, self.redis.hgetall(RunKeys(run_id).record))) for run_id in run_ids]
        return [
            Holder(run_id, state, each.get(b"base", b"").decode()) for run_id, each in raw if (state := self._use(each))
        ]

    def _use(self, raw: dict[bytes, bytes]) -> str:
        """Return an active run's state, or ""."""
        try:
            return record.state if raw and self.is_active(record := RunRecord.decode(raw)) else ""
        except ForeignRecordError:
            return "managed by another version of Offbeat" if self._has_heartbeat(raw) else ""

    def _has_heartbeat(self, raw: Mapping[bytes, bytes]) -> bool:
        """Return whether a reconciler of any version attends the run."""
        try:
            beat = float(raw.get(b"beat", b"0"))
        except ValueError:
            beat = 0.0
        return self.clock() - beat < ORPHANED_AFTER_S

    def is_active(self, record: RunRecord) -> bool:
        return not record.state.is_terminal and self.clock() - record.beat < self._patience_s(record)

    def _patience_s(self, record: RunRecord) -> float:
        return self.orphaned_after_s if record.mesh == self.mesh else ORPHANED_AFTER_S

    def _hint(self, record: RunRecord) -> str:
        if math.isinf(patience_s := self._patience_s(record)):
            return ""
        return f" (if it was killed, it counts as dead after {patience_s:.0f} s of silence)"

    def _new(self, spec: RunSpec, old: RunRecord | None) -> RunRecord:
        now = self.clock()
        uid = old.uid if old and old.uid else secrets.token_hex(8)
        record = RunRecord(spec.run_id, spec.config, spec.output_dir, spec.max_steps, spec.settings)
        record = replace(record, started_at=now, beat=now, uid=uid, downloads=" ".join(spec.downloads), base=spec.base)
        record = replace(record, mesh=self.mesh)
        if old is None:
            return replace(record, created_at=now)
        return replace(record, created_at=old.created_at, attempt=old.attempt + 1)

    async def load(self, run_id: str) -> RunRecord:
        """Return a run's record; raises `UnknownRunError`, `LostRecordError`, `ForeignRecordError`."""
        keys = RunKeys(run_id)
        raw = await cast(Any, self.redis.hgetall(keys.record))
        if run_id in self.attended and b"config" not in raw:
            async with self.redis.pipeline() as pipe:  # a transaction: it may be deleted and created anew meanwhile
                pipe.hgetall(keys.record)
                pipe.ttl(keys.epoch)
                raw, epoch_ttl_s = await pipe.execute()
            if b"config" not in raw and epoch_ttl_s <= 0:
                raise LostRecordError(f"Redis has lost the record of run {run_id!r}: it is being restored, try again")
        if not raw:
            raise UnknownRunError(f"there is no run {run_id!r}")
        return RunRecord.decode(raw)

    async def run_ids(self) -> list[str]:
        return [member.decode() for member in await self.redis.zrange(RUNS, 0, -1)]

    async def unfinished(self) -> list[str]:
        """Return the mesh's active runs, oldest first, unreadable ones included."""
        over = {state.value.encode() for state in RunState if state.is_terminal}
        return [run_id for run_id, state in await self._own("state") if state not in over]

    async def current(self, *, ended_after: float) -> list[str]:
        """Return active runs of all meshes, and those ended after a Unix time, oldest first."""
        return [run_id for run_id, (end,) in await self._fields("ended_at") if not _is_before(end, ended_after)]

    async def reports_due(self) -> list[str]:
        """Return the mesh's runs whose report is to be written."""
        return [run_id for run_id, report in await self._own("report") if report == REPORT_DUE.encode()]

    async def _own(self, name: str) -> list[tuple[str, bytes | None]]:
        """Return the mesh's runs, oldest first, with a field of each record."""
        rows = await self._fields(name, "mesh")
        return [(run_id, value) for run_id, (value, mesh) in rows if (mesh or b"").decode() == self.mesh]

    async def _fields(self, *names: str) -> list[tuple[str, list[bytes | None]]]:
        """Return all runs, oldest first, with fields of each record."""
        run_ids = await self.run_ids()
        async with self.redis.pipeline(transaction=False) as pipe:
            for run_id in run_ids:
                pipe.hmget(RunKeys(run_id).record, list(names))
            return list(zip(run_ids, await pipe.execute(), strict=True))

    @repeat_transaction
    async def close_report(self, record: RunRecord, report: str) -> None:
        """Record a report's outcome, unless the run was deleted or restarted."""
        key = RunKeys(record.run_id).record
        async with self.redis.pipeline() as pipe:
            await pipe.watch(key)
            started_at, due = await cast(Any, pipe.hmget(key, ["started_at", "report"]))
            if due != REPORT_DUE.encode() or float(started_at) != record.started_at:
                return
            pipe.multi()
            pipe.hset(key, "report", report)
            await pipe.execute()

    async def page(self, after: tuple[float, str] | None, name: str) -> list[tuple[float, str]]:
        """Return (created_at, id) after `after`, newest first; `name` is a glob."""
        rows = await self.redis.zrange(RUNS, 0, -1, desc=True, withscores=True)
        places = [(float(score), member.decode()) for member, score in rows]
        return [
            place
            for place in sorted(places, reverse=True)
            if fnmatch.fnmatchcase(place[1], name) and (after is None or place < after)
        ]

    @repeat_transaction
    async def want(self, run_id: str, wanted: DesiredState) -> RunRecord:
        """Set the desired state; no effect on an ended run. A final one ends a run that no mesh reconciles any more.

        Raises:
            UnknownRunError: no such run.
            RunStateError: pause or resume of a run that is over or ending.
        """
        key = RunKeys(run_id).record
        async with self.redis.pipeline() as pipe:
            await pipe.watch(key)
            record = await self.load(run_id)
            is_orphaned = wanted.is_final and not record.state.is_terminal and not self.is_active(record)
            if not is_orphaned and not self._may_want(record, wanted):
                return record
            pipe.multi()
            pipe.hset(key, "wanted", wanted.value)
            write_event(pipe, run_id, "wanted", {"wanted": wanted.value})
            if is_orphaned:
                pipe.hset(key, mapping={"state": RunState.STOPPED.value, "ended_at": str(self.clock())})
                write_event(pipe, run_id, "state", {"state": RunState.STOPPED.value})
            await pipe.execute()
            return await self.load(run_id) if is_orphaned else replace(record, wanted=wanted)

    @staticmethod
    def _may_want(record: RunRecord, wanted: DesiredState) -> bool:
        """Return whether the state changes; raises `RunStateError`."""
        if wanted.is_final:
            return not record.state.is_terminal and record.wanted not in (wanted, DesiredState.KILLED)
        verb = "pause" if wanted is DesiredState.PAUSED else "resume"
        if record.state.is_terminal:
            raise RunStateError(f"run {record.run_id!r} is {record.state}: it can't {verb}")
        if record.is_ending:
            raise RunStateError(f"run {record.run_id!r} is ending: it can't {verb} any more")
        return record.wanted is not wanted

    @repeat_transaction
    async def change(self, run_id: str, values: Mapping[str, float], *, after: int | None = None) -> bool:
        """Request new settings; raises `UnknownRunError`, `RunStateError`.

        after: number of changes with which these were validated; with others, nothing is requested. Return whether it is.
        """
        keys = RunKeys(run_id)
        async with self.redis.pipeline() as pipe:
            await pipe.watch(keys.record, keys.changes)
            record = await self.load(run_id)
            if record.state.is_terminal or record.is_ending:
                state = record.state if record.state.is_terminal else "ending"
                raise RunStateError(f"run {run_id!r} is {state}: its settings can no longer change")
            if after is not None and after != await cast(Any, pipe.llen(keys.changes)):
                return False
            pipe.multi()
            pipe.rpush(keys.changes, encode_change(values, self.clock()))
            write_event(pipe, run_id, "asked", {"values": dict(values)})
            await pipe.execute()
            return True

    async def changes(self, run_id: str) -> list[Change]:
        keys = RunKeys(run_id)
        # Not a transaction, which a Redis without memory refuses to queue
        async with self.redis.pipeline(transaction=False) as pipe:
            pipe.lrange(keys.changes, 0, -1)
            pipe.hgetall(keys.adopted)
            blobs, adopted = await pipe.execute()
        steps = {int(place): int(step) for place, step in adopted.items()}
        return [decode_change(blob, steps.get(place)) for place, blob in enumerate(blobs)]

    async def recent_changes(self, run_id: str) -> RecentChanges:
        """Return the newest changes, and the values of earlier ones, which are read once."""
        return await read_recent_changes(self.redis, run_id, self._earlier)

    async def settings(self, record: RunRecord) -> Settings:
        return (await self.recent_changes(record.run_id)).settings(record.settings)

    async def update(self, run_id: str, **changes: str | float) -> None:
        mapping = {name: str(value) for name, value in changes.items()}
        async with self.redis.pipeline() as pipe:
            pipe.hset(RunKeys(run_id).record, mapping=cast(dict[Any, Any], mapping))
            if "state" in changes:
                event = {name: changes[name] for name in ("state", "error") if changes.get(name)}
                write_event(pipe, run_id, "state", event)
            await pipe.execute()

    async def end_unreadable(self, record: RunRecord, reason: str) -> RunState:
        """End a run that is to end and whose components can't be found; return its state."""
        outcome = record.outcome if record.state is RunState.DRAINING else RunState.STOPPED
        error = record.error or f"{reason}; what still runs of it was not stopped, deleting the run fences its learner"
        await self.update(record.run_id, state=outcome, error=error, ended_at=self.clock())
        return outcome

    @repeat_transaction
    async def delete(self, run_id: str) -> None:
        """Delete a run's keys and fence its learners.

        Raises:
            UnknownRunError: no such run.
            RunStateError: not over, or another version's with a recent heartbeat.
        """
        keys = RunKeys(run_id)
        async with self.redis.pipeline() as pipe:
            await pipe.watch(keys.record, *map(claims_key, KINDS))  # a start meanwhile is not deleted
            await self._refuse_deletion(run_id)
            stale = await self._keys_of(run_id)
            claims = without_run(run_id, {kind: await self._claims(kind) for kind in KINDS})
            pipe.multi()
            write_claims(pipe, claims)
            if stale:
                pipe.delete(*stale)
            pipe.incr(keys.epoch)
            pipe.expire(keys.epoch, EPOCH_TTL_S)
            pipe.zrem(RUNS, run_id)
            await pipe.execute()

    async def _refuse_deletion(self, run_id: str) -> None:
        try:
            record = await self.load(run_id)
        except ForeignRecordError:
            if self._has_heartbeat(await cast(Any, self.redis.hgetall(RunKeys(run_id).record))):
                raise RunStateError(
                    f"run {run_id!r} is managed by another version of Offbeat: stop it there first"
                ) from None
            return
        if self.is_active(record):
            raise RunStateError(f"run {run_id!r} is {record.state}: stop it first{self._hint(record)}")

    async def _keys_of(self, run_id: str) -> list[bytes]:
        keys = RunKeys(run_id)
        pattern = keys.prefix.replace("[", r"\[").replace("?", r"\?") + "*"
        found = self.redis.scan_iter(match=pattern, count=1000)
        return [key async for key in found if key != keys.epoch.encode()]


def claim_keys(spec: RunSpec) -> list[str]:
    """Return the keys that decide on a start's claims."""
    return [key for kind in spec.claims for key in (claims_key(kind), slots_key(kind))]


def _is_before(end: bytes | None, at: float) -> bool:
    try:
        return 0 < float(end or b"0") < at
    except ValueError:
        return False


def _differences(old: Settings, new: Settings) -> dict[str, float]:
    before = asdict(old)
    return {name: value for name, value in asdict(new).items() if value != before[name]}
