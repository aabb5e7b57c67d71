"""`ipc` and `nccl` on real GPUs: what the learner holds in its memory is what the engine samples with."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import redis
import torch
from redis.asyncio import Redis as AsyncRedis
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat.services.generation.config import Dtype, EngineModelArgs, EngineStrategy, GenerationConfig, VllmConfig
from offbeat.services.generation.replica import GenerationReplica
from offbeat.services.generation.vllm.engine import VllmEngine
from offbeat.services.messages.types import Completion, GenerateRequest, Sampling
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.publisher import RedisWeightPublisher
from offbeat.services.weights.subscriber import RedisWeightSubscriber
from offbeat.trainer.models.lora import named_weights
from tests.families import ROUTED, write_family
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

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {},
    "glm4_moe": {},
    "deepseek_v3": ROUTED
    | {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
}
"""With sizes that the kernels take."""


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


@asynccontextmanager
async def serving(
    url: str, model: Path, transport: Literal["ipc", "nccl"], dtype: Dtype, *, enforce_eager: bool
) -> AsyncIterator[GenerationReplica]:
    """Serve a model without weights, which follows the run's versions."""
    environment = dict(os.environ)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # as in Ray's workers: CUDA does not survive a fork
    arguments = VllmConfig.model_validate({**FEW_BYTES, "enforce_eager": enforce_eager})
    config = GenerationConfig(
        device="cuda", model_args=EngineModelArgs(dtype=dtype), strategy_args=EngineStrategy(strategy_config=arguments)
    )
    engine = await VllmEngine.start(config, model, sequence_length=128, seed=1, transport=transport)
    async with AsyncRedis.from_url(url) as connection:
        with redis.Redis.from_url(url) as pulls:
            weights = WeightsConfig(transport=transport)
            subscriber = RedisWeightSubscriber(connection, RUN, weights, model.parent, pulls=pulls)
            replica = GenerationReplica("gpu", engine, subscriber, config)
            following = asyncio.create_task(replica.follow())
            yield replica
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
    engine.close()
    os.environ.clear()
    os.environ.update(environment)


async def sampled(replica: GenerationReplica, version: int) -> tuple[GenerateRequest, Completion]:
    """Return a request and its answer by a version, once that is served."""
    await wait_until(lambda: replica.status()["version"] == version, timeout_s=120)
    request = GenerateRequest(f"r{version}", tuple(range(4, 28)), Sampling(max_new_tokens=32), version)
    ((completion,),) = [batch async for batch in replica.generate([request])]
    assert completion.versions[0].version == version
    return request, completion


@pytest.mark.parametrize("enforce_eager", [True, False])
async def test_the_engine_samples_with_what_the_learner_holds(
    redis_url: str,
    publisher: RedisWeightPublisher,
    transport: Literal["ipc", "nccl"],
    learner_device: str,
    tmp_path: Path,
    enforce_eager: bool,
) -> None:
    """With CUDA graphs, too, which read the parameters at their addresses."""
    model = write_policy(tmp_path / "policy")
    async with serving(redis_url, model, transport, "float32", enforce_eager=enforce_eager) as replica:
        for version in range(3):
            policy: Any = random_policy(model, version)
            publisher.publish(version, version, named_tensors(policy.to(learner_device)))
            request, completion = await sampled(replica, version)
            assert mismatch(policy.to("cpu"), request, completion).max() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
async def test_experts_are_those_that_the_learner_holds(
    redis_url: str,
    publisher: RedisWeightPublisher,
    transport: Literal["ipc", "nccl"],
    learner_device: str,
    tmp_path: Path,
    family: str,
) -> None:
    """In bfloat16, which rounds routers' choices, too: logprobs are far closer to this version's than to the last one's."""
    folder = tmp_path / "policy"
    write_family(folder, family, **FAMILIES[family], initializer_range=0.1)
    config = AutoConfig.from_pretrained(folder)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    async with serving(redis_url, folder, transport, "bfloat16", enforce_eager=True) as replica:
        last: Any = None
        for version in range(3):
            torch.manual_seed(version)
            policy: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            held = policy.bfloat16().to(learner_device)
            publisher.publish(version, version, ((name, each.detach()) for name, each in named_weights(held)))
            request, completion = await sampled(replica, version)
            policy = policy.to("cpu").float()
            own = mismatch(policy, request, completion).mean()
            assert last is None or own < 0.1 * mismatch(last, request, completion).mean(), own
            assert own < 0.1
            last = policy
