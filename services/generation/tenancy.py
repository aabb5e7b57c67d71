"""A run that an engine samples for.

Invariant: no result of one run's weights reaches another run: each tenancy has its own replica object and prefix-cache
salt.
"""

import asyncio
import json
import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, JsonValue
from redis import Redis as SyncRedis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, TimeoutError

from offbeat.services.errors import RetryableError, RewoundError
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.engine import TenantEngine
from offbeat.services.generation.replica import GenerationReplica
from offbeat.services.keys import OFFERS, RunKeys, claims_key, slots_key, split_claim
from offbeat.services.redis.connection import OutageRetry, connect_async
from offbeat.services.telemetry import AsyncRedisMetrics
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.replica_reports import ReplicaLoad
from offbeat.services.weights.subscriber import RedisWeightSubscriber, ReplicaReporter

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
APP = "app"


@dataclass(frozen=True, slots=True)
class Tenant:
    run_id: str
    output_dir: Path
    weights: WeightsConfig
    uid: str = ""
    """Unique id."""
    start: str = ""
    """Distinguishes starts of one name."""
    request_timeout_s: float | None = None
    """Of `actor_infer`; None: the application's."""


class EngineOffer(BaseModel):
    architecture: dict[str, JsonValue]
    """`config.json` of its model."""
    sequence_length: int
    """Longest context, tokens."""
    config: GenerationConfig
    transport: str
    log_dir: str


class _EngineRules(BaseModel):
    model_config = ConfigDict(extra="ignore")

    request_timeout_s: float | None = None


class _SharingRules(BaseModel):
    model_config = ConfigDict(extra="ignore")

    weights: WeightsConfig
    actor_infer: _EngineRules = _EngineRules()


def read_architecture(model: Path) -> dict[str, JsonValue]:
    return json.loads((model / "config.json").read_text())


async def make_offer(redis: Redis, app: str, offer: EngineOffer) -> None:
    async with redis.pipeline() as pipe:
        pipe.hset(OFFERS, app, offer.model_dump_json())
        pipe.hset(slots_key(APP), app, str(offer.config.engine.max_loras))
        await pipe.execute()


def read_offers(redis: SyncRedis) -> dict[str, EngineOffer]:
    raw = cast(dict[bytes, bytes], redis.hgetall(OFFERS))
    return {name.decode(): EngineOffer.model_validate_json(blob) for name, blob in raw.items()}


async def find_tenants(redis: Redis, app: str) -> list[Tenant]:
    """Return the runs that have claimed an application, the first one first."""
    claim = cast(bytes | None, await cast(Any, redis.hget(claims_key(APP), app)))
    found = [await _find_tenant(redis, run_id) for run_id in split_claim(claim)]
    return [tenant for tenant in found if tenant is not None]


async def _find_tenant(redis: Redis, run_id: str) -> Tenant | None:
    fields = ["config", "output_dir", "created_at", "attempt", "uid"]
    *record, uid = await cast(Any, redis.hmget(RunKeys(run_id).record, fields))
    if None in record:
        return None
    config, output_dir, created_at, attempt = (value.decode() for value in record)
    rules = _SharingRules.model_validate_json(config)
    return Tenant(
        run_id,
        Path(output_dir),
        rules.weights,
        (uid or b"").decode(),
        f"{created_at}/{attempt}",
        rules.actor_infer.request_timeout_s,
    )


async def report_refusal(redis_url: str, tenant: Tenant, replica_id: str, reason: str) -> None:
    """Report why a replica can't serve a run, which then fails with it."""
    redis = connect_async(redis_url)
    try:
        await ReplicaReporter(redis, tenant.run_id, tenant.uid).report(replica_id, -1, ReplicaLoad(refused=reason))
    finally:
        await redis.aclose()


class Tenancy:
    def __init__(
        self, tenant: Tenant, replica_id: str, engine: TenantEngine, config: GenerationConfig, redis_url: str
    ) -> None:
        """Raises WeightsError or StoreUnavailableError if its weights can't be reached; the engine is as it was."""
        redis = connect_async(redis_url)
        # Without patience: a request that came twice would be served twice.
        pulls = SyncRedis.from_url(redis_url, retry=OutageRetry(0.0))
        self._replica_id = replica_id
        self._subscriber = subscriber = RedisWeightSubscriber(
            redis,
            tenant.run_id,
            tenant.weights,
            tenant.output_dir,
            pulls=pulls,
            workers=config.engine.world_size,
            adapters=config.engine.max_lora_rank is not None,
            run_uid=tenant.uid,
        )
        self.tenant = tenant
        self._engine, self._salt = engine, secrets.token_hex(4)
        self._redis, self._pulls = redis, pulls
        self._metrics = AsyncRedisMetrics(redis, tenant.run_id, tenant.uid)
        if tenant.request_timeout_s is not None:
            config = config.model_copy(update={"request_timeout_s": tenant.request_timeout_s})
        self.replica = GenerationReplica(replica_id, engine.salted(self._salt), subscriber, config)
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Load the newest weights and follow the broker; raises `GenerationError`."""
        reporting = asyncio.create_task(self._report())  # reading the weights may take long, and is reported
        try:
            await self.replica.catch_up()
        except BaseException:
            reporting.cancel()
            raise
        self._tasks = [asyncio.create_task(self.replica.follow()), reporting]

    async def end(self) -> None:
        """Stop answering; wait until the engine holds no request of the run or half-loaded update."""
        await self.replica.settle()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.replica.retire(f"run {self.tenant.run_id} has left this application")
        await self._engine.release(self._salt)
        with suppress(RetryableError):  # the broker misses it in a while anyway
            await self._subscriber.retire(self._replica_id)
        await self._redis.aclose()
        self._pulls.close()

    @property
    def has_rewound(self) -> bool:
        """Whether the served version is of a lineage that did not survive."""
        ended = [task for task in self._tasks if task.done() and not task.cancelled()]
        return any(isinstance(getattr(task.exception(), "__cause__", None), RewoundError) for task in ended)

    async def check(self) -> None:
        """Raise the error that requires replacement."""
        for task in self._tasks:
            if task.done():
                task.result()
        await self.replica.check_health()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            try:
                await self._metrics.append(self.replica.take_metrics())
                await self.replica.report()
            except (ConnectionError, TimeoutError, RetryableError):  # Redis restarts; the next record comes in a second
                continue
