"""The real SGLang server: its logprobs are the learner's before and after an update under running requests."""

import asyncio
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from offbeat.services.generation.config import EngineModelArgs, EngineStrategy, GenerationConfig, VllmConfig
from offbeat.services.generation.sglang.engine import SglangEngine
from offbeat.services.messages.types import GenerateRequest, Sampling, VersionSpan
from tests.integration.policy_weights import mismatch, random_policy, save_weights, write_policy

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available() or find_spec("sglang") is None, reason="needs a GPU and SGLang"),
    pytest.mark.timeout(600),
]

TOLERANCE = 2e-2
"""bfloat16, with other kernels than transformers' on a CPU."""


@pytest_asyncio.fixture
async def engine(tmp_path: Path) -> AsyncIterator[SglangEngine]:
    strategy = EngineStrategy(strategy_name="sglang", strategy_config=VllmConfig(gpu_memory_utilization=0.3))
    config = GenerationConfig(device="cuda", model_args=EngineModelArgs(dtype="bfloat16"), strategy_args=strategy)
    engine = await SglangEngine.start(config, write_policy(tmp_path), sequence_length=512, seed=1)
    yield engine
    engine.close()


async def test_tokens_have_the_learners_logprobs_across_an_update(engine: SglangEngine, tmp_path: Path) -> None:
    models = [random_policy(tmp_path, seed) for seed in range(2)]
    files = [save_weights(model, tmp_path / f"{i}.safetensors") for i, model in enumerate(models)]
    await engine.load(files[0], 0)

    def ask(name: str, most: int) -> GenerateRequest:
        return GenerateRequest(name, tuple(range(4, 28)), Sampling(max_new_tokens=most))

    for request in (ask("first", 32), ask("cached", 32)):
        answer = await engine.generate(request, 0)
        assert answer.versions == (VersionSpan(0, 32, 0),)
        assert float(mismatch(models[0], request, answer).max()) < TOLERANCE
    running = asyncio.create_task(engine.generate(ask("long", 480), 0))
    await engine.generate(ask("beside", 8), 0)  # the long one has begun by then
    await engine.load(files[1], 1)
    assert [span.version for span in (await running).versions] == [0, 1]
    request = ask("after", 32)
    assert float(mismatch(models[1], request, await engine.generate(request, 1)).max()) < TOLERANCE
