"""The generation service as a Ray Serve application."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from ray import serve
from ray.serve import Application
from ray.serve.schema import LoggingConfig

from offbeat.services.device_turns import EngineTurns
from offbeat.services.devices import EngineDevices
from offbeat.services.generation.client import DEPLOYMENT, split_messages
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.engines import start_engine
from offbeat.services.generation.replica import ReplicaStatus
from offbeat.services.generation.request_router import AwakeReplicaRouter
from offbeat.services.generation.tenancy import EngineOffer, Tenant, make_offer, read_architecture
from offbeat.services.generation.tenants import Tenants
from offbeat.services.messages.codec import decode_requests, encode_completions
from offbeat.services.placement import claim_devices, deployment_options
from offbeat.services.process import freeze_started
from offbeat.services.redis.connection import connect, connect_async
from offbeat.services.telemetry import configure_logging
from offbeat.services.weights.config import WeightsConfig

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
        if settings.tenant is not None:
            settings = replace(settings, config=settings.config.with_engine(max_loras=1))
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
        self._engine = await start_engine(
            s.config,
            s.model,
            sequence_length=s.sequence_length,
            seed=s.seed + context.rank.rank,
            transport=s.transport,
        )
        self._tenants = Tenants(self._app, self._replica_id, self._engine, s.config, s.redis_url)
        self._taking_turns: asyncio.Task[None] | None = None
        if s.tenant is not None:
            tenancy = await self._tenants.admit(s.tenant)
            if self._turns is not None:
                self._taking_turns = asyncio.create_task(self._turns.take(tenancy.replica))
        else:
            await self._tenants.begin(self._redis)
        freeze_started()
        self._following = None if s.tenant else asyncio.create_task(self._tenants.follow(self._redis))

    async def generate(self, blob: bytes, asleep: Sequence[str] = (), run: str = "") -> AsyncIterator[bytes]:
        """Yield encoded completions as they finish.

        asleep: replicas to which the router prefers others. run: whose policy samples; empty: that of the only one.
        """
        del asleep
        tenancy = await self._tenants.find(run)
        async for completions in tenancy.replica.generate(decode_requests(blob)):
            for part in split_messages(completions):
                yield encode_completions(part)

    async def abort(self, request_ids: list[str], run: str = "") -> None:
        await self._tenants.abort(request_ids, run)

    async def statuses(self) -> dict[str, ReplicaStatus]:
        """Return what is served, by run."""
        return self._tenants.statuses()

    async def check_health(self) -> None:
        """Raise if Serve must replace the replica."""
        if self._following and self._following.done():
            self._following.result()
        if self._taking_turns and self._taking_turns.done():
            self._taking_turns.result()
        await self._engine.check()
        await self._tenants.check()

    def _join_turns(self) -> EngineTurns | None:
        """Return the turns with the learner, if it has devices of this engine."""
        s = self._settings
        is_shared = self._devices is None or self._devices.slot.is_shared
        if s.tenant is None or not s.config.engine.enable_sleep_mode or not is_shared:
            return None
        return EngineTurns(connect(s.redis_url), s.tenant.run_id, s.tenant.uid, self._replica_id)

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
