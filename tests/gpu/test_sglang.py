"""The real SGLang server: its logprobs are the learner's before and after an update under running requests."""

from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from offbeat.services.generation.config import EngineModelArgs, EngineStrategy, GenerationConfig, VllmConfig
from offbeat.services.generation.sglang.engine import SglangEngine
from tests.integration.policy_weights import write_policy
from tests.integration.sglang_server import check_logprobs_across_an_update

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
    await check_logprobs_across_an_update(engine, tmp_path, TOLERANCE)
