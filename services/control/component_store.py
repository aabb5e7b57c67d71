"""What a run's components report, and what the reconciler observed of them, in Redis."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from offbeat.services.control.interfaces import Health, Observation
from offbeat.services.control.run import ComponentReports, LearnerReport, Restarts, WeightProgress, decode_fields
from offbeat.services.keys import RunKeys

MAX_HISTORY = 1000


def write_event(pipe: Pipeline, run_id: str, event: str, detail: Mapping[str, Any]) -> None:
    """Append to the run's history."""
    entry = {"e": event, "d": json.dumps(detail)}
    pipe.xadd(RunKeys(run_id).history, cast(dict[Any, Any], entry), maxlen=MAX_HISTORY, approximate=True)


@dataclass(frozen=True, slots=True)
class ComponentStore:
    redis: Redis
    clock: Callable[[], float]

    async def progress(self, run_id: str) -> WeightProgress:
        raw = await cast(Any, self.redis.hgetall(RunKeys(run_id).progress))
        return WeightProgress(int(raw.get(b"version", -1)), int(raw.get(b"step", -1)))

    async def restarts(self, run_id: str) -> dict[str, Restarts]:
        return _decode_restarts(await cast(Any, self.redis.hgetall(RunKeys(run_id).key("restarts"))))

    async def set_restarts(self, run_id: str, component: str, restarts: Restarts, why: str) -> None:
        """Store a component's deaths and the last one's reason."""
        async with self.redis.pipeline() as pipe:
            pipe.hset(RunKeys(run_id).key("restarts"), component, json.dumps(asdict(restarts)))
            detail = {"component": component, "why": why, "restarts": restarts.total, "step": max(restarts.step, 0)}
            write_event(pipe, run_id, "died", detail)
            await pipe.execute()

    async def set_observations(self, run_id: str, seen: dict[str, Observation]) -> None:
        """Store the components' states and the heartbeat; note recoveries."""
        mapping = {name: json.dumps(asdict(observation)) for name, observation in seen.items()}
        async with self.redis.pipeline() as pipe:
            pipe.hgetall(RunKeys(run_id).key("restarts"))
            if mapping:
                pipe.hset(RunKeys(run_id).key("components"), mapping=cast(dict[Any, Any], mapping))
            pipe.hset(RunKeys(run_id).record, "beat", str(self.clock()))
            restarts, *_ = await pipe.execute()
        await self._note_recoveries(run_id, _decode_restarts(restarts), seen)

    async def _note_recoveries(
        self, run_id: str, restarts: Mapping[str, Restarts], seen: Mapping[str, Observation]
    ) -> None:
        recovered = {
            name: replace(deaths, has_recovered=True)
            for name, deaths in restarts.items()
            if not deaths.has_recovered and name in seen and seen[name].health is Health.READY
        }
        if not recovered:
            return
        step = max((await self.progress(run_id)).step, 0)
        async with self.redis.pipeline() as pipe:
            for name, deaths in recovered.items():
                pipe.hset(RunKeys(run_id).key("restarts"), name, json.dumps(asdict(deaths)))
                write_event(pipe, run_id, "recovered", {"component": name, "step": step})
            await pipe.execute()

    async def observations(self, run_id: str) -> dict[str, Observation]:
        return _decode_observations(await cast(Any, self.redis.hgetall(RunKeys(run_id).key("components"))))

    async def learner(self, run_id: str) -> LearnerReport:
        key = RunKeys(run_id).record
        return LearnerReport.decode(await cast(Any, self.redis.hmget(key, list(LearnerReport.FIELDS))))

    async def reports(self, run_id: str) -> ComponentReports:
        keys = RunKeys(run_id)
        async with self.redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.doing)
            pipe.hgetall(keys.served)
            pipe.exists(keys.lease)
            pipe.time()
            workers, replicas, leased, (now_s, now_us) = await pipe.execute()
        return ComponentReports.decode(workers, replicas, leased, ahead_s=self.clock() - now_s - now_us / 1e6)

    async def metrics_window(self, run_id: str, window_s: float) -> tuple[int, tuple[int, int]]:
        """Return where the last seconds begin on Redis' clock (ms), by which metric records are numbered, and the newest
        record's id; (0, 0) without any.
        """
        async with self.redis.pipeline(transaction=False) as pipe:
            pipe.time()
            pipe.xrevrange(RunKeys(run_id).metrics, count=1)
            (now_s, now_us), entries = await pipe.execute()
        newest = _decode_id(entries[0][0]) if entries else (0, 0)
        now_ms = max(now_s * 1000 + now_us // 1000, newest[0])  # ids never go back, unlike the clock
        return max(now_ms - int(window_s * 1000), 0), newest

    async def metrics_after(self, run_id: str, entry_id: str, count: int) -> list[tuple[tuple[int, int], bytes]]:
        """Return the next encoded metric records and their ids, oldest first."""
        entries = await self.redis.xrange(RunKeys(run_id).metrics, min=f"({entry_id}", count=count)
        return [(_decode_id(raw_id), fields[b"r"]) for raw_id, fields in entries]


def _decode_id(raw: bytes) -> tuple[int, int]:
    milliseconds, _, sequence = raw.partition(b"-")
    return int(milliseconds), int(sequence)


def _decode_observations(raw: Mapping[bytes, bytes]) -> dict[str, Observation]:
    return {name.decode(): decode_fields(Observation, value, health=Health) for name, value in raw.items()}


def _decode_restarts(raw: Mapping[bytes, bytes]) -> dict[str, Restarts]:
    return {name.decode(): decode_fields(Restarts, value) for name, value in raw.items()}
