"""`ipc` and `nccl` on real GPUs: what the learner holds in its memory is what the engine samples with."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import redis
import torch
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.generation.config import EngineModelArgs, EngineStrategy, GenerationConfig, VllmConfig
from offbeat.services.generation.replica import GenerationReplica
from offbeat.services.generation.vllm.engine import VllmEngine
from offbeat.services.messages.types import GenerateRequest, Sampling
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.publisher import RedisWeightPublisher
from offbeat.services.weights.subscriber import RedisWeightSubscriber
from tests.integration.policy_weights import (
    mismatch,
    named_tensors,
    random_policy,
    write_policy,
)
from tests.services.weights.publishing import give_lease
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]

RUN = "device-weights"
FEW_BYTES = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}
"""Several tests may share a GPU: vLLM allocates this much, and measures nothing."""
TOLERANCE = 5e-3
"""vLLM's Triton attention multiplies float32 as TF32, with 10 bits of mantissa; 2.5e-3 on an H200."""


@pytest.fixture(params=["ipc", "nccl"])
def transport(request: pytest.FixtureRequest) -> Literal["ipc", "nccl"]:
    if request.param == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a GPU for each end")
    return request.param


@pytest.fixture
def learner_device(transport: str) -> str:
    return "cuda:1" if transport == "nccl" else "cuda:0"


@pytest.fixture
def publisher(redis_url: str, transport: Literal["ipc", "nccl"], tmp_path: Path) -> Iterator[RedisWeightPublisher]:
    with redis.Redis.from_url(redis_url) as server:
        give_lease(server, RUN, 1)
        publisher = RedisWeightPublisher(server, RUN, WeightsConfig(transport=transport), 1, tmp_path)
        yield publisher
        publisher.close()


@pytest.fixture
async def replica(
    redis_url: str, transport: Literal["ipc", "nccl"], tmp_path: Path
) -> AsyncIterator[GenerationReplica]:
    environment = dict(os.environ)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # as in Ray's workers: CUDA does not survive a fork
    config = GenerationConfig(
        device="cuda",
        model_args=EngineModelArgs(dtype="float32"),
        strategy_args=EngineStrategy(strategy_config=VllmConfig.model_validate(FEW_BYTES)),
    )
    engine = await VllmEngine.start(
        config, write_policy(tmp_path / "policy"), sequence_length=512, seed=1, transport=transport
    )
    async with AsyncRedis.from_url(redis_url) as connection:
        with redis.Redis.from_url(redis_url) as pulls:
            subscriber = RedisWeightSubscriber(
                connection, RUN, WeightsConfig(transport=transport), tmp_path, pulls=pulls
            )
            replica = GenerationReplica("gpu", engine, subscriber, config)
            following = asyncio.create_task(replica.follow())
            yield replica
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
    engine.close()
    os.environ.clear()
    os.environ.update(environment)


async def test_the_engine_samples_with_what_the_learner_holds(
    publisher: RedisWeightPublisher, replica: GenerationReplica, learner_device: str, tmp_path: Path
) -> None:
    for version in range(3):
        policy: Any = random_policy(tmp_path / "policy", version)
        held = policy.to(learner_device)
        publisher.publish(version, version, named_tensors(held))
        await wait_until(lambda version=version: replica.status()["version"] == version, timeout_s=120)
        request = GenerateRequest(f"r{version}", tuple(range(4, 28)), Sampling(max_new_tokens=32), version)
        ((completion,),) = [batch async for batch in replica.generate([request])]
        assert completion.versions[0].version == version
        assert mismatch(policy.to("cpu"), request, completion).max() < TOLERANCE
