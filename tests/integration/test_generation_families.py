"""The real engine's logprobs are the model's after each update: multimodal folders on text, and mixtures of experts."""

import asyncio
import gc
import os
from pathlib import Path
from typing import Any

import pytest

from offbeat.services.generation.config import EngineModelArgs, GenerationConfig
from offbeat.services.generation.vllm.engine import VllmEngine
from offbeat.services.messages.types import GenerateRequest, Sampling
from tests.families import write_multimodal
from tests.integration.hybrid_policy import random_hybrid, write_hybrid
from tests.integration.policy_weights import mismatch, save_weights

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("engine_forks")]

PROMPT = tuple(range(8, 28)) * 4
SIZES = {"vocab_size": 128, "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": False}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4], "mrope_interleaved": True}


async def assert_follows_updates(folder: Path, dtype: Any, noise: float) -> None:
    """Load three versions, staged and in the pause. noise: mean difference of logprobs."""
    environment = dict(os.environ)
    config = GenerationConfig(model_args=EngineModelArgs(dtype=dtype), kv_cache_gib=0.1)
    engine = await VllmEngine.start(config, folder, sequence_length=512, seed=1)
    models = [random_hybrid(folder, seed) for seed in range(2)]
    if dtype == "bfloat16":
        models = [model.bfloat16().float() for model in models]
    files = [save_weights(model, folder / f"{seed}.st") for seed, model in enumerate(models)]
    try:
        for version, (index, is_staged) in enumerate(((0, True), (1, True), (0, False))):
            if is_staged:
                await engine.stage(files[index])
            await engine.load(files[index], version)
            request = GenerateRequest(f"r{version}", PROMPT, Sampling(max_new_tokens=48))
            completion = await engine.generate(request, version)
            assert [tuple(span) for span in completion.versions] == [(0, 48, version)]
            assert mismatch(models[index], request, completion).mean() < noise
            assert mismatch(models[1 - index], request, completion).mean() > 0.15
    finally:
        await engine.sessions.close_all()
        engine.close()
        del engine
        await asyncio.sleep(0)
        gc.collect()  # vLLM's client wants to be gone before the interpreter is
        os.environ.clear()
        os.environ.update(environment)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3_vl", {"rope_parameters": ROPE}),
        ("qwen3_vl_moe", {"rope_parameters": ROPE, "norm_topk_prob": True}),
        ("gemma3", {}),
        ("mistral3", {}),
    ],
)
async def test_multimodal_folders_are_sampled_on_text(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Their files have towers, which the engine has not."""
    write_multimodal(tmp_path, kind, **SIZES | changes)
    await assert_follows_updates(tmp_path, "float32", 1e-4)


@pytest.mark.parametrize(
    ("kind", "dtype", "noise"),
    [
        ("qwen3_moe", "float32", 1e-4),
        ("qwen2_moe", "float32", 1e-4),
        ("mixtral", "float32", 1e-4),
        ("qwen3_next", "bfloat16", 0.08),
        ("qwen3_5_moe_text", "bfloat16", 0.08),
    ],
)
async def test_experts_follow_updates_on_a_cpu(kind: str, dtype: str, noise: float, tmp_path: Path) -> None:
    """vLLM packs those of the first weights alone, and would compute the others as if they were packed."""
    write_hybrid(tmp_path, kind, num_attention_heads=2, num_key_value_heads=2)
    await assert_follows_updates(tmp_path, dtype, noise)
