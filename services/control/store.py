"""Run records, all of them in Redis.

Invariants: only the API changes `wanted`, only the reconciler changes `state`; a run id names at most one run that is
not over, and so does a thing that runs claim; whatever a control replica knows, the next one reads here; the epochs of a
run id never begin again, so that a learner that was cut off finds itself fenced, by the next run of its name too.
"""

import fnmatch
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import WatchError

from offbeat.services.control.interfaces import Health, Observation
from offbeat.services.control.run import (
    BusyError,
    ComponentReports,
    DesiredState,
    ForeignRecordError,
    LearnerReport,
    Progress,
    Restarts,
    RunExistsError,
    RunRecord,
    RunSpec,
    RunState,
    RunStateError,
    UnknownRunError,
)
from offbeat.services.keys import RUNS, RunKeys, claims_key
from offbeat.services.live_settings import (
    Change,
    Settings,
    decode_change,
    encode_change,
    settings_now,
)
from offbeat.services.telemetry import MetricRecord, decode_record
from offbeat.services.weights.replica_reports import decode_report

ORPHANED_AFTER_S = 30.0
"""A run that no reconciler has looked at for so long runs nowhere, as far as who is no reconciler can tell."""
OF_ONE_ATTEMPT = ("restarts", "components", "learner", "doing")
"""What is known of the processes that run a run; void when it is started again."""
HISTORY_KEPT = 1000
EPOCH_KEPT_S = 7 * 24 * 3600
"""A deleted run's epoch outlives it by so much: longer than any learner that was cut off could take to come back."""


@dataclass(frozen=True, slots=True)
class RunStore:
    """Run records in one Redis."""

    redis: Redis
    clock: Callable[[], float] = field(default=time.time)
    orphaned_after_s: float = ORPHANED_AFTER_S
    """See `ORPHANED_AFTER_S`; infinite for who looks after all runs itself: however long it was away, they go on."""

    async def create(self, spec: RunSpec, *, takeover: bool = False) -> tuple[RunRecord, bool]:
        """Record a run that shall go on; creating the same run again changes nothing.

        A run of that name that is over is forgotten but for its epoch, which goes up and so fences who still holds it; or it
        is resumed if `spec.resume` says so, and keeps its settings, but for those that its configuration now has otherwise.
        takeover: treat one that is not over as if nothing of it ran, because the caller knows so.

        Returns:
            the record, and whether this call made it.

        Raises:
            RunExistsError: a run of that name goes on with another configuration.
            BusyError: another run that goes on claims the same.
        """
        keys, claimed = RunKeys(spec.run_id), [claims_key(kind) for kind in spec.claims]
        while True:
            async with self.redis.pipeline() as pipe:
                await pipe.watch(keys.record, *claimed)
                raw = cast(dict[bytes, bytes], await pipe.hgetall(keys.record))  # pyright: ignore[reportGeneralTypeIssues]
                old = RunRecord.decode(raw) if raw else None
                if old and not takeover and self._goes_on(old):
                    if old.config == spec.config:
                        return old, False
                    raise RunExistsError(
                        f"run {spec.run_id!r} is {old.state}: stop it first, or name this one otherwise{self._hint()}"
                    )
                await self._refuse_busy(spec)
                record = self._new(spec, old if spec.resume else None)
                stale = [] if spec.resume else await self._keys_of(spec.run_id)
                pipe.multi()
                if stale:
                    pipe.delete(*stale)
                if not spec.resume:
                    pipe.incr(keys.epoch)
                pipe.persist(keys.epoch)  # a deleted run's expires
                pipe.delete(keys.record, *(keys.key(name) for name in OF_ONE_ATTEMPT))
                pipe.hset(keys.record, mapping=cast(dict[Any, Any], record.encode()))
                pipe.zadd(RUNS, {spec.run_id: record.created_at})
                for kind, name in spec.claims.items():
                    pipe.hset(claims_key(kind), name, spec.run_id)
                if spec.resume and old and (values := _differences(old.settings, spec.settings)):
                    pipe.rpush(keys.changes, encode_change(values, self.clock()))
                self._note(pipe, spec.run_id, "created", {"attempt": record.attempt})
                try:
                    await pipe.execute()
                except WatchError:
                    continue
                return record, True

    async def _refuse_busy(self, spec: RunSpec) -> None:
        for kind, name in spec.claims.items():
            holder = await cast(Any, self.redis.hget(claims_key(kind), name))
            if holder is None or holder.decode() == spec.run_id:
                continue
            raw = await cast(Any, self.redis.hgetall(RunKeys(holder.decode()).record))
            if state := self._use(raw):
                raise BusyError(
                    f"{kind} {name!r} is in use by run {holder.decode()!r}, which is {state}: "
                    f"stop that one first, or take another {kind}"
                )

    def _use(self, raw: dict[bytes, bytes]) -> str:
        """What a run is that goes on; empty where nothing of it runs."""
        try:
            return record.state if raw and self._goes_on(record := RunRecord.decode(raw)) else ""
        except ForeignRecordError:
            return "looked after by another version of Offbeat" if self._beats(raw) else ""

    def _beats(self, raw: Mapping[bytes, bytes]) -> bool:
        """Whether somebody looks after a run, whoever has recorded it."""
        try:
            beat = float(raw.get(b"beat", b"0"))
        except ValueError:
            beat = 0.0
        return self.clock() - beat < ORPHANED_AFTER_S

    def _goes_on(self, record: RunRecord) -> bool:
        return not record.state.over and self.clock() - record.beat < self.orphaned_after_s

    def _hint(self) -> str:
        if math.isinf(self.orphaned_after_s):
            return ""
        return f" (if it was killed: it is taken for dead once it has been silent for {self.orphaned_after_s:.0f} s)"

    def _new(self, spec: RunSpec, old: RunRecord | None) -> RunRecord:
        now = self.clock()
        record = RunRecord(
            spec.run_id, spec.config, spec.output_dir, spec.max_steps, spec.settings, started_at=now, beat=now
        )
        if old is None:
            return replace(record, created_at=now)
        return replace(record, created_at=old.created_at, attempt=old.attempt + 1)

    async def load(self, run_id: str) -> RunRecord:
        """The run's record. Raises `UnknownRunError`."""
        raw = await cast(Any, self.redis.hgetall(RunKeys(run_id).record))
        if not raw:
            raise UnknownRunError(f"there is no run {run_id!r}")
        return RunRecord.decode(raw)

    async def run_ids(self) -> list[str]:
        """Every run, oldest first."""
        return [member.decode() for member in await self.redis.zrange(RUNS, 0, -1)]

    async def unfinished(self) -> list[str]:
        """Every run that is not known to be over, oldest first."""
        run_ids = await self.run_ids()
        async with self.redis.pipeline(transaction=False) as pipe:
            for run_id in run_ids:
                pipe.hget(RunKeys(run_id).record, "state")
            states = await pipe.execute()
        over = {state.value.encode() for state in RunState if state.over}
        return [run_id for run_id, state in zip(run_ids, states, strict=True) if state not in over]

    async def page(self, after: tuple[float, str] | None, name: str) -> list[tuple[float, str]]:
        """(created at, id) of the runs whose id fits the glob `name`, newest first; those after the place `after`."""
        rows = await self.redis.zrange(RUNS, 0, -1, desc=True, withscores=True)
        places = [(float(score), member.decode()) for member, score in rows]
        return [
            place
            for place in sorted(places, reverse=True)
            if fnmatch.fnmatchcase(place[1], name) and (after is None or place < after)
        ]

    async def want(self, run_id: str, wanted: DesiredState) -> RunRecord:
        """Say what a run should be. Ending what is over or ends already changes nothing.

        Raises:
            UnknownRunError: there is no such run.
            RunStateError: it is to pause or go on, and is over or ends.
        """
        key = RunKeys(run_id).record
        while True:
            async with self.redis.pipeline() as pipe:
                await pipe.watch(key)
                record = await self.load(run_id)
                if not self._may_want(record, wanted):
                    return record
                pipe.multi()
                pipe.hset(key, "wanted", wanted.value)
                self._note(pipe, run_id, "wanted", {"wanted": wanted.value})
                try:
                    await pipe.execute()
                except WatchError:
                    continue
                return replace(record, wanted=wanted)

    @staticmethod
    def _may_want(record: RunRecord, wanted: DesiredState) -> bool:
        """Whether that is news. Raises `RunStateError`."""
        if wanted.ends:
            return not record.state.over and record.wanted not in (wanted, DesiredState.KILLED)
        verb = "pause" if wanted is DesiredState.PAUSED else "go on"
        if record.state.over:
            raise RunStateError(f"run {record.run_id!r} is {record.state}: it can't {verb}")
        if record.wanted.ends or record.state is RunState.DRAINING:
            raise RunStateError(f"run {record.run_id!r} is ending: it can't {verb} any more")
        return record.wanted is not wanted

    async def change(self, run_id: str, values: Mapping[str, float]) -> Change:
        """Ask for other settings. Raises `UnknownRunError`, or `RunStateError` for a run that is over or ends."""
        record = await self.load(run_id)
        if record.state.over or record.wanted.ends:
            state = record.state if record.state.over else "ending"
            raise RunStateError(f"run {run_id!r} is {state}: its settings can't change any more")
        change = Change(dict(values), self.clock())
        async with self.redis.pipeline() as pipe:
            pipe.rpush(RunKeys(run_id).changes, encode_change(change.values, change.at))
            self._note(pipe, run_id, "asked", {"values": change.values})
            await pipe.execute()
        return change

    async def changes(self, run_id: str) -> list[Change]:
        """Every change of the run's settings, in the order in which they were asked for."""
        keys = RunKeys(run_id)
        # Not a transaction, which a Redis without memory refuses to queue
        async with self.redis.pipeline(transaction=False) as pipe:
            pipe.lrange(keys.changes, 0, -1)
            pipe.hgetall(keys.adopted)
            blobs, adopted = await pipe.execute()
        steps = {int(place): int(step) for place, step in adopted.items()}
        return [decode_change(blob, steps.get(place)) for place, blob in enumerate(blobs)]

    async def settings(self, record: RunRecord) -> Settings:
        """What holds now."""
        return settings_now(record.settings, await self.changes(record.run_id))

    async def update(self, run_id: str, **changes: str | float) -> None:
        """Write some of a record's fields (the reconciler's)."""
        mapping = {name: str(value) for name, value in changes.items()}
        async with self.redis.pipeline() as pipe:
            pipe.hset(RunKeys(run_id).record, mapping=cast(dict[Any, Any], mapping))
            if "state" in changes:
                told = {name: changes[name] for name in ("state", "error") if changes.get(name)}
                self._note(pipe, run_id, "state", told)
            await pipe.execute()

    async def delete(self, run_id: str) -> None:
        """Forget a run: every key of it but its epoch, which goes up, to fence who still holds it, and stays for a while.
        One that another version has recorded must have been silent for a while.

        Raises:
            UnknownRunError: there is none.
            RunStateError: it is not over.
        """
        try:
            record = await self.load(run_id)
        except ForeignRecordError:
            if self._beats(await cast(Any, self.redis.hgetall(RunKeys(run_id).record))):
                raise RunStateError(
                    f"run {run_id!r} is looked after by another version of Offbeat: stop it there first"
                ) from None
        else:
            if not record.state.over:
                raise RunStateError(f"run {run_id!r} is {record.state}: stop it first")
        stale, epoch = await self._keys_of(run_id), RunKeys(run_id).epoch
        async with self.redis.pipeline() as pipe:
            if stale:
                pipe.delete(*stale)
            pipe.incr(epoch)
            pipe.expire(epoch, EPOCH_KEPT_S)
            pipe.zrem(RUNS, run_id)
            await pipe.execute()

    async def progress(self, run_id: str) -> Progress:
        """How far the published weights have come."""
        raw = await cast(Any, self.redis.hgetall(RunKeys(run_id).progress))
        return Progress(int(raw.get(b"version", -1)), int(raw.get(b"step", -1)))

    async def restarts(self, run_id: str) -> dict[str, Restarts]:
        """How often each component has died."""
        raw = await cast(Any, self.redis.hgetall(RunKeys(run_id).key("restarts")))
        return {name.decode(): Restarts(**json.loads(value)) for name, value in raw.items()}

    async def set_restarts(self, run_id: str, component: str, restarts: Restarts, why: str) -> None:
        """Keep how often a component has died, the last time of `why`."""
        async with self.redis.pipeline() as pipe:
            pipe.hset(RunKeys(run_id).key("restarts"), component, json.dumps(asdict(restarts)))
            self._note(pipe, run_id, "died", {"component": component, "why": why, "restarts": restarts.total})
            await pipe.execute()

    async def set_observations(self, run_id: str, seen: dict[str, Observation]) -> None:
        """Keep how the components were, for who asks; also says that a reconciler looks after the run."""
        mapping = {name: json.dumps(asdict(observation)) for name, observation in seen.items()}
        async with self.redis.pipeline() as pipe:
            if mapping:
                pipe.hset(RunKeys(run_id).key("components"), mapping=cast(dict[Any, Any], mapping))
            pipe.hset(RunKeys(run_id).record, "beat", str(self.clock()))
            await pipe.execute()

    async def observations(self, run_id: str) -> dict[str, Observation]:
        """How the components were when the reconciler last looked."""
        raw = await cast(Any, self.redis.hgetall(RunKeys(run_id).key("components")))
        seen = {name.decode(): json.loads(value) for name, value in raw.items()}
        return {name: Observation(**{**tree, "health": Health(tree["health"])}) for name, tree in seen.items()}

    async def learner(self, run_id: str) -> LearnerReport:
        """What the learner says of itself."""
        names = ["learner_phase", "learner_doing", "learner_metrics", "learner_trouble"]
        phase, doing, metrics, trouble = await cast(Any, self.redis.hmget(RunKeys(run_id).record, names))
        return LearnerReport(
            phase.decode() if phase else "",
            json.loads(doing) if doing else {},
            json.loads(metrics) if metrics else {},
            trouble.decode() if trouble else "",
        )

    async def reports(self, run_id: str) -> ComponentReports:
        """What env workers and replicas said last, and whether a learner holds the run."""
        keys = RunKeys(run_id)
        async with self.redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.doing)
            pipe.hgetall(keys.served)
            pipe.exists(keys.lease)
            doing, served, leased = await pipe.execute()
        workers = {name.decode(): json.loads(blob) for name, blob in doing.items()}
        replicas = {name.decode(): decode_report(blob) for name, blob in served.items()}
        return ComponentReports(workers, replicas, bool(leased))

    async def metrics_since(self, run_id: str, at: float) -> list[MetricRecord]:
        """All metric records that were appended after the Unix time `at`, oldest first."""
        entries = await self.redis.xrange(RunKeys(run_id).metrics, min=int(at * 1000))
        return [decode_record(fields[b"r"]) for _, fields in entries]

    @staticmethod
    def _note(pipe: Pipeline, run_id: str, event: str, detail: Mapping[str, Any]) -> None:
        """Add to the run's history."""
        entry = {"e": event, "d": json.dumps(detail)}
        pipe.xadd(RunKeys(run_id).history, cast(dict[Any, Any], entry), maxlen=HISTORY_KEPT, approximate=True)

    async def _keys_of(self, run_id: str) -> list[bytes]:
        """All but its epoch."""
        keys = RunKeys(run_id)
        pattern = keys.prefix.replace("[", r"\[").replace("?", r"\?") + "*"
        found = self.redis.scan_iter(match=pattern, count=1000)
        return [key async for key in found if key != keys.epoch.encode()]


def _differences(old: Settings, new: Settings) -> dict[str, float]:
    before = asdict(old)
    return {name: value for name, value in asdict(new).items() if value != before[name]}
