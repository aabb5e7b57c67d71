"""The runs that a replica's engine samples for.

Invariant: no more runs are served at once than the engine has room for; each begins and ends without waiting for another
one, unless it takes the other one's place.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from redis import exceptions as redis_errors
from redis.asyncio import Redis

from offbeat.services.errors import GenerationError, RetryableError, StoreUnavailableError, WeightsError
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.engine import TenantEngine
from offbeat.services.generation.replica import ReplicaStatus
from offbeat.services.generation.tenancy import Tenancy, Tenant, find_tenants, report_refusal
from offbeat.services.log_format import log_fields_setter
from offbeat.services.redis.errors import complaint

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.5
RETRY_INTERVAL_S = 5.0
"""Between tries to reach a run's weights."""
TENANT_TIMEOUT_S = 20.0
"""Of calls for a run that is not served."""


@dataclass
class _Stay:
    """A run's time in the engine: `tenancy` is None until it has begun, and after it has left."""

    tenant: Tenant
    has_left: asyncio.Event = field(default_factory=asyncio.Event)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Also set if it failed to."""
    tenancy: Tenancy | None = None
    task: asyncio.Task[None] | None = None

    @property
    def begins_anew(self) -> bool:
        """Whether it has to end and begin again: its run went back; the engine and other runs stay."""
        return self.task is not None and self.tenancy is not None and self.tenancy.has_rewound


class Tenants:
    def __init__(
        self, app: str, replica_id: str, engine: TenantEngine, config: GenerationConfig, redis_url: str
    ) -> None:
        self._app = app
        self._replica_id = replica_id
        self._engine = engine
        self._config = config
        self._redis_url = redis_url
        self._max_runs = config.engine.max_loras
        self._stays: dict[str, _Stay] = {}
        """By run; the next one of a run begins when the one before has ended."""
        self._changed = asyncio.Condition()

    async def admit(self, tenant: Tenant) -> Tenancy:
        """Serve a run for good; return once it has the newest weights. Raises `GenerationError`."""
        stay = self._stays[tenant.run_id] = _Stay(tenant)
        stay.tenancy = await self._begin(tenant)
        return stay.tenancy

    async def begin(self, redis: Redis) -> None:
        """Begin the runs that claim the application; return once each has the newest weights, or has failed."""
        await self._read_claims(redis)
        for stay in list(self._stays.values()):
            await stay.has_begun.wait()

    async def follow(self, redis: Redis) -> None:
        """Serve the runs that claim the application, until cancelled; raises an ended run's error."""
        while True:
            await self._read_claims(redis)
            leaving = [stay.task for stay in self._stays.values() if stay.task and stay.has_left.is_set()]
            if leaving:
                await asyncio.wait(leaving, timeout=CHECK_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(CHECK_INTERVAL_S)

    async def find(self, run_id: str) -> Tenancy:
        """Return a run's tenancy, for "" that of the only run; raises `RetryableError` if it is not served in time."""
        if (tenancy := self._serving(run_id)) is not None:
            return tenancy
        try:
            async with asyncio.timeout(TENANT_TIMEOUT_S), self._changed:
                await self._changed.wait_for(lambda: self._serving(run_id))
        except TimeoutError:
            raise RetryableError(f"{self._app} does not serve {f'run {run_id}' if run_id else 'a run'}") from None
        tenancy = self._serving(run_id)
        assert tenancy is not None
        return tenancy

    async def abort(self, request_ids: Sequence[str], run_id: str) -> None:
        for stay in self._stays.values():
            if stay.tenancy is not None and run_id in ("", stay.tenant.run_id):
                await stay.tenancy.replica.abort(request_ids)

    def statuses(self) -> dict[str, ReplicaStatus]:
        """Return what is served, by run."""
        return {run_id: stay.tenancy.replica.status() for run_id, stay in self._stays.items() if stay.tenancy}

    async def check(self) -> None:
        """Raise the error that requires replacement."""
        for stay in list(self._stays.values()):
            if stay.task is not None and stay.task.done():
                stay.task.result()
            if stay.tenancy is not None and not stay.begins_anew:
                await stay.tenancy.check()

    async def _read_claims(self, redis: Redis) -> None:
        try:
            claimed = await find_tenants(redis, self._app)
        except (redis_errors.ConnectionError, redis_errors.TimeoutError) as error:
            logger.warning("runs unchanged: %s", complaint(error))
        else:
            self._change(claimed)

    def _serving(self, run_id: str) -> Tenancy | None:
        if run_id:
            return self._stays[run_id].tenancy if run_id in self._stays else None
        served = [stay.tenancy for stay in self._stays.values() if stay.tenancy is not None]
        if len(served) > 1:
            raise GenerationError(f"{self._app} serves {len(served)} runs: the call must name one")
        return served[0] if served else None

    def _change(self, claimed: Sequence[Tenant]) -> None:
        """Let the runs go that have no claim any more, and begin others where there is room."""
        wanted = {tenant.run_id: tenant for tenant in claimed[: self._max_runs]}
        for run_id, stay in list(self._stays.items()):
            if stay.task is not None and stay.task.done() and stay.has_left.is_set():
                stay.task.result()
                del self._stays[run_id]
            elif wanted.get(run_id) != stay.tenant or stay.begins_anew:
                stay.has_left.set()
        for run_id, tenant in wanted.items():
            if run_id not in self._stays and len(self._stays) < self._max_runs:
                stay = self._stays[run_id] = _Stay(tenant)
                stay.task = asyncio.create_task(self._serve(stay), name=f"run {run_id}")

    async def _serve(self, stay: _Stay) -> None:
        try:
            while (tenancy := await self._try_to_begin(stay.tenant)) is None:
                stay.has_begun.set()
                with suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_INTERVAL_S):
                        await stay.has_left.wait()
                    return
        finally:
            stay.has_begun.set()
        async with self._changed:
            stay.tenancy = tenancy
            self._changed.notify_all()
        await stay.has_left.wait()
        stay.tenancy = None
        await tenancy.end()
        logger.info("run %s has left", stay.tenant.run_id)

    async def _try_to_begin(self, tenant: Tenant) -> Tenancy | None:
        """Return None, and tell the run, if its weights can't be reached from here, which other runs do not notice."""
        try:
            return await self._begin(tenant)
        except StoreUnavailableError as error:
            logger.warning("run %s can't be served yet: %s", tenant.run_id, error)
        except WeightsError as error:
            logger.error("run %s can't be served: %s", tenant.run_id, error)
            with suppress(RetryableError):  # reported again with the next try
                await report_refusal(self._redis_url, tenant, self._replica_id, str(error))
        return None

    async def _begin(self, tenant: Tenant) -> Tenancy:
        log_fields_setter(is_shared=self._max_runs > 1)(run=tenant.run_id)
        tenancy = Tenancy(tenant, self._replica_id, self._engine, self._config, self._redis_url)
        await tenancy.begin()
        logger.info("serves run %s", tenant.run_id)
        return tenancy
