"""Engines that serve a folder's weights."""

from pathlib import Path

import pytest

from offbeat.services.errors import GenerationError
from offbeat.services.generation.config import EngineModelArgs, EngineStrategy, GenerationConfig
from offbeat.services.generation.engines import serving_config, start_serving
from offbeat.services.generation.sglang.server import server_arguments
from offbeat.services.generation.vllm.arguments import engine_arguments
from offbeat.services.messages.types import GenerateRequest, Sampling
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig, TinyVisionConfig
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.integration.policy_weights import mismatch, random_policy, write_policy


def config_of(name: str, **arguments: object) -> GenerationConfig:
    strategy = EngineStrategy.model_validate({"strategy_name": name, "strategy_config": arguments})
    args = EngineModelArgs(dtype="float32")
    return GenerationConfig(model_args=args, strategy_args=strategy, kv_cache_gib=0.1)


async def test_hf_infer_serves_the_folders_weights_as_their_version(tmp_path: Path) -> None:
    folder = write_policy(tmp_path)
    model = random_policy(folder, 3)
    model.save_pretrained(folder)
    engine = await start_serving(config_of("hf_infer"), folder, 7, sequence_length=64, seed=1)
    try:
        request = GenerateRequest("a", tuple(range(4, 20)), Sampling(max_new_tokens=16))
        completion = await engine.generate(request, 7)
        assert mismatch(model, request, completion).max() < 1e-5
        assert [tuple(span) for span in completion.versions] == [(0, 16, 7)]
    finally:
        engine.close()


def test_an_engine_of_one_version_reads_the_folder_and_takes_no_adapters(tmp_path: Path) -> None:
    """A LoRA run's checkpoint has merged weights."""
    folder = write_policy(tmp_path)
    lora = config_of("vllm", max_lora_rank=8, max_loras=4, enable_sleep_mode=True, load_format="dummy")
    arguments = engine_arguments(serving_config(lora, 7), folder, 64, 1)
    assert arguments["load_format"] == "auto"
    assert "enable_lora" not in arguments
    words = server_arguments(serving_config(config_of("sglang"), 7), folder, 64, 1)
    assert [words[words.index(name) + 1] for name in ("--load-format", "--weight-version")] == ["auto", "7"]


async def test_hf_infer_refuses_a_policy_with_image_input(tmp_path: Path) -> None:
    write_tiny_policy(tmp_path, TinyPolicyConfig(vision=TinyVisionConfig()), ["w"])
    with pytest.raises(GenerationError, match="hf_infer reads none: take vllm"):
        await start_serving(config_of("hf_infer"), tmp_path, 0, sequence_length=64, seed=1)
