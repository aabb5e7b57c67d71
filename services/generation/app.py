"""The generation service as a Ray Serve application."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from ray import serve
from ray.serve import Application
from ray.serve.schema import LoggingConfig
from redis import exceptions as redis_errors

from offbeat.services.device_turns import EngineTurns
from offbeat.services.devices import EngineDevices
from offbeat.services.errors import RetryableError
from offbeat.services.generation.client import DEPLOYMENT, split_messages
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.engine import TenantEngine
from offbeat.services.generation.replica import ReplicaStatus
from offbeat.services.generation.request_router import AwakeReplicaRouter
from offbeat.services.generation.tenancy import (
    EngineOffer,
    Tenancy,
    Tenant,
    find_tenant,
    make_offer,
    read_architecture,
)
from offbeat.services.log_format import set_process_log_fields
from offbeat.services.messages.codec import decode_requests, encode_completions
from offbeat.services.placement import claim_devices, deployment_options
from offbeat.services.process import freeze_started, uncollected_imports
from offbeat.services.redis.connection import connect, connect_async
from offbeat.services.redis.errors import complaint
from offbeat.services.telemetry import configure_logging
from offbeat.services.weights.config import WeightsConfig

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.5
TENANT_TIMEOUT_S = 20.0
"""Of calls to an unclaimed application."""
MAX_ONGOING_CALLS = 4096
"""Per replica; each carries several turns."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    tenant: Tenant | None
    """Run to serve; None: any that claims the application."""
    config: GenerationConfig
    transport: str
    """`WeightsConfig.transport`; fixed when the engine starts."""
    model: Path
    sequence_length: int
    redis_url: str
    log_dir: Path
    seed: int
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of the replica and its engine."""
    slots: tuple[EngineDevices, ...] = ()
    """Devices of engines; empty: Ray chooses."""


class GenerationDeployment:
    async def __init__(self, settings: ReplicaSettings) -> None:
        context = serve.get_replica_context()
        self._settings = s = settings
        self._app, self._replica_id = context.app_name, context.replica_tag
        os.environ.update(s.environment)
        configure_logging(f"generation-{self._replica_id}", s.log_dir)
        self._devices = claim_devices(s.slots, "engine")
        self._redis = connect_async(s.redis_url)
        if s.tenant is None:
            await self._make_offer()
        self._turns = self._join_turns()
        if self._turns is not None:
            await self._turns.acquire()
        self._tenancy: Tenancy | None = None
        self._occupied = asyncio.Event()
        self._engine = await _start_engine(s, s.seed + context.rank.rank)
        if s.tenant is not None:
            await self._serve(s.tenant)
        self._taking_turns: asyncio.Task[None] | None = None
        if self._turns is not None and self._tenancy is not None:
            self._taking_turns = asyncio.create_task(self._turns.take(self._tenancy.replica))
        freeze_started()
        self._watching = None if s.tenant else asyncio.create_task(self._serve_whoever_claims())

    async def generate(self, blob: bytes, asleep: Sequence[str] = ()) -> AsyncIterator[bytes]:
        """Yield encoded completions as they finish. asleep: replicas to which the router prefers others."""
        del asleep
        tenancy = self._tenancy or await self._wait_for_tenant()
        async for completions in tenancy.replica.generate(decode_requests(blob)):
            for part in split_messages(completions):
                yield encode_completions(part)

    async def abort(self, request_ids: list[str]) -> None:
        if self._tenancy:
            await self._tenancy.replica.abort(request_ids)

    async def status(self) -> ReplicaStatus | None:
        return self._tenancy.replica.status() if self._tenancy else None

    async def check_health(self) -> None:
        """Raise if Serve must replace the replica."""
        if self._watching and self._watching.done():
            self._watching.result()
        if self._taking_turns and self._taking_turns.done():
            self._taking_turns.result()
        await self._engine.check()
        if self._tenancy:
            await self._tenancy.check()

    def _join_turns(self) -> EngineTurns | None:
        """Return the turns with the learner, if it has devices of this engine."""
        s = self._settings
        is_shared = self._devices is None or self._devices.slot.is_shared
        if s.tenant is None or not s.config.engine.enable_sleep_mode or not is_shared:
            return None
        return EngineTurns(connect(s.redis_url), s.tenant.run_id, s.tenant.uid, self._replica_id)

    async def _serve(self, tenant: Tenant | None) -> None:
        before, self._tenancy = self._tenancy, None
        self._occupied.clear()
        if before is not None:
            await before.end()
            logger.info("run %s has left", before.tenant.run_id)
        if tenant is not None:
            s = self._settings
            set_process_log_fields(run=tenant.run_id)
            tenancy = Tenancy(tenant, self._replica_id, self._engine, s.config, s.redis_url)
            await tenancy.begin()
            self._tenancy = tenancy
            self._occupied.set()
            logger.info("serves run %s", tenant.run_id)

    async def _serve_whoever_claims(self) -> None:
        while True:
            try:
                tenant = await find_tenant(self._redis, self._app)
            except (redis_errors.ConnectionError, redis_errors.TimeoutError) as error:
                logger.warning("version unchanged: %s", complaint(error))
            else:
                if tenant != (self._tenancy.tenant if self._tenancy else None):
                    await self._serve(tenant)
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def _wait_for_tenant(self) -> Tenancy:
        try:
            async with asyncio.timeout(TENANT_TIMEOUT_S):
                await self._occupied.wait()
        except TimeoutError:
            raise RetryableError(f"{self._app} serves no run") from None
        assert self._tenancy is not None
        return self._tenancy

    async def _make_offer(self) -> None:
        s = self._settings
        context = s.config.engine.max_model_len or s.sequence_length
        offer = EngineOffer(
            architecture=read_architecture(s.model),
            sequence_length=context,
            config=s.config,
            transport=s.transport,
            log_dir=str(s.log_dir),
        )
        await make_offer(self._redis, self._app, offer)

    def __del__(self) -> None:
        engine = self.__dict__.get("_engine")
        if engine is not None:
            engine.close()


async def _start_engine(settings: ReplicaSettings, seed: int) -> TenantEngine:
    """Start the configured engine with random weights."""
    s = settings
    # each imports libraries that take seconds, and that the others do not need
    if s.config.strategy_args.strategy_name == "hf_infer":
        with uncollected_imports():
            from offbeat.services.generation.hf.engine import HfEngine  # noqa: PLC0415

        return await HfEngine.start(s.config, s.model, sequence_length=s.sequence_length, seed=seed)
    if s.config.strategy_args.strategy_name == "sglang":
        from offbeat.services.generation.sglang.engine import SglangEngine  # noqa: PLC0415

        return await SglangEngine.start(s.config, s.model, sequence_length=s.sequence_length, seed=seed)
    from offbeat.services.generation.vllm.engine import VllmEngine  # noqa: PLC0415

    return await VllmEngine.start(
        s.config, s.model, sequence_length=s.sequence_length, seed=seed, transport=s.transport
    )


def build(
    run_id: str,
    config: GenerationConfig,
    weights: WeightsConfig,
    *,
    model: Path,
    sequence_length: int,
    redis_url: str,
    output_dir: Path,
    seed: int,
    environment: Mapping[str, str] = MappingProxyType({}),
    uid: str = "",
    slots: tuple[EngineDevices, ...] = (),
) -> Application:
    """Build a run's application; replicas are ready with the newest weights, if any."""
    tenant = Tenant(run_id, output_dir, weights, uid)
    logs = output_dir / "logs"
    transport = weights.transport
    return deploy(
        ReplicaSettings(
            tenant, config, transport, model, sequence_length, redis_url, logs, seed, dict(environment), slots
        )
    )


def deploy(settings: ReplicaSettings) -> Application:
    config = settings.config
    deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=config.num_replicas,
        max_ongoing_requests=MAX_ONGOING_CALLS,
        health_check_period_s=1.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=2.0,
        request_router_config={"request_router_class": AwakeReplicaRouter},
        logging_config=LoggingConfig(enable_access_log=False),  # a line per call would cost more than the call says
        **deployment_options(
            cpus=config.cpus_per_replica,
            gpus=config.engine.world_size if config.device == "cuda" else 0,
            slots=settings.slots,
        ),
    )(GenerationDeployment)
    return deployment.bind(settings)
