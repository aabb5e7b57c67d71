"""Run records: what a run should be and what it is, all of it in Redis.

Invariants: only the API changes `wanted`, only the reconciler changes `state`; a run id names at most one run that is
not over; whatever a control replica knows, the next one reads here.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import WatchError

from services.control.components import Health, Observation
from services.errors import ControlError
from services.keys import RUNS, RunKeys
from services.telemetry import MetricRecord, decode_record

ORPHANED_AFTER_S = 10.0
"""A run that no reconciler has looked at for so long runs nowhere."""


OF_ONE_ATTEMPT = ("restarts", "components", "learner")
"""What is known of the processes that run a run; void when it is started again."""


class Wanted(StrEnum):
    """What a person wants of a run."""

    RUNNING = "running"
    STOPPED = "stopped"
    """Drain, checkpoint, end; it may be resumed."""
    KILLED = "killed"
    """End now, without draining; it may be resumed from its last checkpoint."""


class RunState(StrEnum):
    """What a run is."""

    PREPARING = "preparing"
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        return self in (RunState.FINISHED, RunState.STOPPED, RunState.FAILED)


class RunExistsError(ControlError):
    """A run of that name is going on."""


class UnknownRunError(ControlError):
    """There is no run of that name."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A validated run, as much of it as the control service needs to know."""

    run_id: str
    config: str
    """The whole configuration as JSON."""
    output_dir: str
    """Absolute."""
    max_steps: int
    resume: bool = False
    """Go on with what an earlier run of this name left in Redis, instead of forgetting it."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as Redis holds it; times are Unix seconds, 0 where it has not come to that."""

    run_id: str
    config: str
    output_dir: str
    max_steps: int
    wanted: Wanted = Wanted.RUNNING
    state: RunState = RunState.PREPARING
    outcome: RunState = RunState.FINISHED
    """What it becomes when it has drained."""
    error: str = ""
    log: str = ""
    """File that tells more about `error`."""
    attempt: int = 1
    """Times it was started: 1, and one more each time it was resumed."""
    created_at: float = 0.0
    started_at: float = 0.0
    """Of this attempt."""
    running_at: float = 0.0
    draining_at: float = 0.0
    ended_at: float = 0.0
    beat: float = 0.0
    """When a reconciler last looked."""

    def encode(self) -> dict[str, str]:
        return {name: str(value) for name, value in asdict(self).items()}

    @classmethod
    def decode(cls, raw: dict[bytes, bytes]) -> "RunRecord":
        kinds = {"max_steps": int, "attempt": int, "wanted": Wanted, "state": RunState, "outcome": RunState}
        values: dict[str, Any] = {}
        for each in fields(cls):
            if (text := raw.get(each.name.encode())) is not None:
                kind = kinds.get(each.name, float if each.name.endswith("_at") or each.name == "beat" else str)
                values[each.name] = kind(text.decode())
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often a component has died without the run getting further in between."""

    count: int = 0
    total: int = 0
    last_at: float = 0.0
    incident: str = ""
    step: int = -1


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the published weights have come; -1 before version 0."""

    version: int = -1
    step: int = -1


@dataclass(frozen=True, slots=True)
class RunStore:
    """Run records in one Redis."""

    redis: Redis
    clock: Callable[[], float] = field(default=time.time)

    async def create(self, spec: RunSpec, *, takeover: bool = False) -> tuple[RunRecord, bool]:
        """Record a run that shall go on; creating the same run again changes nothing.

        A run of that name that is over is forgotten, or resumed if `spec.resume` says so. takeover: treat one that is not
        over as if nothing of it ran, because the caller knows so.

        Returns:
            the record, and whether this call made it.

        Raises:
            RunExistsError: a run of that name goes on with another configuration.
        """
        key = RunKeys(spec.run_id).record
        while True:
            async with self.redis.pipeline() as pipe:
                await pipe.watch(key)
                raw = cast(dict[bytes, bytes], await pipe.hgetall(key))  # pyright: ignore[reportGeneralTypeIssues]
                old = RunRecord.decode(raw) if raw else None
                if old and not old.state.over and not takeover and self.clock() - old.beat < ORPHANED_AFTER_S:
                    if old.config == spec.config:
                        return old, False
                    raise RunExistsError(
                        f"run {spec.run_id!r} is {old.state}: stop it first, or name this one otherwise"
                    )
                record = self._new(spec, old if spec.resume else None)
                stale = [] if spec.resume else await self._keys_of(spec.run_id)
                pipe.multi()
                if stale:
                    pipe.delete(*stale)
                pipe.delete(key, *(RunKeys(spec.run_id).key(name) for name in OF_ONE_ATTEMPT))
                pipe.hset(key, mapping=cast(dict[Any, Any], record.encode()))
                pipe.zadd(RUNS, {spec.run_id: record.created_at})
                try:
                    await pipe.execute()
                except WatchError:
                    continue
                return record, True

    def _new(self, spec: RunSpec, old: RunRecord | None) -> RunRecord:
        now = self.clock()
        record = RunRecord(spec.run_id, spec.config, spec.output_dir, spec.max_steps, started_at=now, beat=now)
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

    async def want(self, run_id: str, wanted: Wanted) -> RunRecord:
        """Say what a run should be; a run that is over stays over. Raises `UnknownRunError`."""
        record = await self.load(run_id)
        if record.state.over:
            return record
        await cast(Any, self.redis.hset(RunKeys(run_id).record, "wanted", wanted.value))
        return replace(record, wanted=wanted)

    async def update(self, run_id: str, **changes: str | float) -> None:
        """Write some of a record's fields (the reconciler's)."""
        mapping = {name: str(value) for name, value in changes.items()}
        await cast(Any, self.redis.hset(RunKeys(run_id).record, mapping=cast(dict[Any, Any], mapping)))

    async def delete(self, run_id: str) -> None:
        """Forget a run whole: every key of it."""
        keys = await self._keys_of(run_id)
        if keys:
            await self.redis.delete(*keys)
        await self.redis.zrem(RUNS, run_id)

    async def progress(self, run_id: str) -> Progress:
        """How far the published weights have come."""
        raw = await cast(Any, self.redis.hgetall(RunKeys(run_id).progress))
        return Progress(int(raw.get(b"version", -1)), int(raw.get(b"step", -1)))

    async def restarts(self, run_id: str) -> dict[str, Restarts]:
        """How often each component has died."""
        raw = await cast(Any, self.redis.hgetall(RunKeys(run_id).key("restarts")))
        return {name.decode(): Restarts(**json.loads(value)) for name, value in raw.items()}

    async def set_restarts(self, run_id: str, component: str, restarts: Restarts) -> None:
        """Keep how often a component has died."""
        await cast(Any, self.redis.hset(RunKeys(run_id).key("restarts"), component, json.dumps(asdict(restarts))))

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

    async def phase(self, run_id: str) -> str:
        """What the learner says that it is at, or nothing."""
        phase = await cast(Any, self.redis.hget(RunKeys(run_id).record, "learner_phase"))
        return phase.decode() if phase else ""

    async def newest_metrics(self, run_id: str, count: int) -> list[MetricRecord]:
        """The last `count` metric records, newest first."""
        entries = await self.redis.xrevrange(RunKeys(run_id).metrics, count=count)
        return [decode_record(fields[b"r"]) for _, fields in entries]

    async def _keys_of(self, run_id: str) -> list[bytes]:
        pattern = RunKeys(run_id).prefix.replace("[", r"\[").replace("?", r"\?") + "*"
        return [key async for key in self.redis.scan_iter(match=pattern, count=1000)]
