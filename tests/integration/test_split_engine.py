"""An engine whose layers are split over two processes samples with each version that it loads."""

import asyncio
import gc
import os
from pathlib import Path
from unittest.mock import patch

from offbeat.services.generation.config import EngineModelArgs, EngineStrategy, GenerationConfig, VllmConfig
from offbeat.services.generation.vllm.engine import VllmEngine
from offbeat.services.messages.types import GenerateRequest, Sampling
from tests.integration.policy_weights import mismatch, random_policy, save_weights, write_policy

FLOAT_NOISE = 5e-5


async def test_two_tensor_ranks_sample_with_the_versions_that_they_load(tmp_path: Path) -> None:
    config = GenerationConfig(
        model_args=EngineModelArgs(dtype="float32"),
        strategy_args=EngineStrategy(strategy_config=VllmConfig(tensor_parallel_size=2)),
        kv_cache_gib=0.25,
    )
    folder = write_policy(tmp_path / "policy")
    with patch.dict(os.environ, VLLM_WORKER_MULTIPROC_METHOD="spawn"):  # as in Ray's workers
        engine = await VllmEngine.start(config, folder, sequence_length=128, seed=1)
        try:
            for version in range(2):
                policy = random_policy(folder, version)
                await engine.load(save_weights(policy, tmp_path / f"{version}.safetensors"), version)
                request = GenerateRequest(f"r{version}", tuple(range(4, 28)), Sampling(max_new_tokens=16))
                completion = await engine.generate(request, version)
                assert [span.version for span in completion.versions] == [version]
                assert mismatch(policy, request, completion).max() < FLOAT_NOISE
        finally:
            engine.close()
            del engine
            await asyncio.sleep(0)
            gc.collect()  # vLLM's client wants to be gone before the interpreter is
