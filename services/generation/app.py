"""The generation service as a Ray Serve application; wiring only."""

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from ray import serve
from ray.serve import Application
from ray.serve.schema import LoggingConfig
from redis import Redis as SyncRedis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, TimeoutError

from services.codec import decode_requests, encode_completions
from services.errors import RetryableError
from services.generation.client import DEPLOYMENT
from services.generation.config import GenerationConfig
from services.generation.engine import VllmEngine
from services.generation.service import GenerationReplica, ReplicaStatus
from services.telemetry import AsyncRedisMetrics, configure_logging
from services.weights.config import WeightsConfig
from services.weights.subscriber import RedisWeightSubscriber

REPORT_EVERY_S = 1.0
MAX_ONGOING_CALLS = 4096
"""Calls in one replica; each carries several turns, and the engine queues what it can't batch."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Plain values: they are pickled on their way to a replica."""

    run_id: str
    config: GenerationConfig
    weights: WeightsConfig
    model: Path
    sequence_length: int
    redis_url: str
    output_dir: Path
    seed: int


class GenerationDeployment:
    """A replica in a process of its own."""

    async def __init__(self, settings: ReplicaSettings) -> None:
        s, context = settings, serve.get_replica_context()
        replica_id = context.replica_tag
        configure_logging(f"generation-{replica_id}", s.output_dir / "logs")
        redis = Redis.from_url(s.redis_url)
        subscriber = RedisWeightSubscriber(
            redis,
            s.run_id,
            s.weights,
            s.output_dir,
            pulls=SyncRedis.from_url(s.redis_url),
            workers=s.config.tensor_parallel_size,
        )
        self._metrics = AsyncRedisMetrics(redis, s.run_id)
        seed = s.seed + context.rank.rank
        self._engine = await VllmEngine.start(
            s.config, s.model, sequence_length=s.sequence_length, seed=seed, transport=s.weights.transport
        )
        self._replica = GenerationReplica(replica_id, self._engine, subscriber, s.config)
        await self._replica.catch_up()
        # A million objects of torch and vLLM stay for good: without this the collector walks them between requests.
        gc.collect()
        gc.freeze()
        self._tasks = [asyncio.create_task(self._replica.follow()), asyncio.create_task(self._report())]

    async def generate(self, blob: bytes) -> AsyncIterator[bytes]:
        """Encoded requests in, encoded completions out as they finish."""
        async for completions in self._replica.generate(decode_requests(blob)):
            yield encode_completions(completions)

    async def abort(self, request_ids: list[str]) -> None:
        """See `GenerationReplica.abort`."""
        await self._replica.abort(request_ids)

    async def status(self) -> ReplicaStatus:
        """See `GenerationReplica.status`."""
        return self._replica.status()

    async def check_health(self) -> None:
        """Called by Serve; raises when the replica must be replaced."""
        for task in self._tasks:
            if task.done():
                task.result()
        await self._replica.check_health()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            try:
                await self._metrics.append(self._replica.take_metrics())
                await self._replica.report()
            except (ConnectionError, TimeoutError, RetryableError):  # Redis restarts; the next record comes in a second
                continue

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
) -> Application:
    """The application `app_name(run_id)`; a replica is ready when its engine runs and holds the newest weights, if any."""
    settings = ReplicaSettings(run_id, config, weights, model, sequence_length, redis_url, output_dir, seed)
    gpus = config.tensor_parallel_size if config.device == "cuda" else 0
    deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=config.num_replicas,
        max_ongoing_requests=MAX_ONGOING_CALLS,
        health_check_period_s=1.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=2.0,
        logging_config=LoggingConfig(enable_access_log=False),  # a line per call would cost more than the call says
        ray_actor_options={"num_cpus": config.cpus_per_replica, "num_gpus": gpus},
    )(GenerationDeployment)
    return deployment.bind(settings)
