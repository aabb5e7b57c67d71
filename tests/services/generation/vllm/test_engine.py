"""What vLLM finds in its environment."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from offbeat.services.generation.config import EngineStrategy, GenerationConfig, VllmConfig
from offbeat.services.generation.vllm.arguments import engine_arguments, engine_environment, extension_arguments
from offbeat.trainer.config.aliases import canonicalize

pytestmark = pytest.mark.slow

HANDLERS_SURVIVE = """
import logging, logging.handlers
target = logging.StreamHandler()
handler = logging.handlers.MemoryHandler(10, target=target)
logging.getLogger("ray.serve").addHandler(handler)
import vllm.logger
print(handler.target is target)
"""
COMPILED_FRAMES = """
import torch
from torch._dynamo.utils import counters
from vllm.v1.sample.ops.logprobs import batched_count_greater_than
batched_count_greater_than(torch.zeros(2, 3), torch.zeros(2, 1))
print(counters["frames"]["total"])
"""


def last_word(code: str, environment: dict[str, str]) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


def test_vllm_leaves_the_handlers_of_serve_alone():
    """Closed ones made Serve's controller take every engine for broken once it had been restarted."""

    assert last_word(HANDLERS_SURVIVE, engine_environment(GenerationConfig())) == "True"


def test_an_eager_engine_on_a_cpu_compiles_nothing():
    assert last_word(COMPILED_FRAMES, engine_environment(GenerationConfig(device="cpu"))) == "0"
    compiled = EngineStrategy(strategy_config=VllmConfig(enforce_eager=False))
    assert "TORCH_COMPILE_DISABLE" not in engine_environment(GenerationConfig(device="cpu", strategy_args=compiled))


@pytest.mark.parametrize(
    ("device", "arguments", "is_eager"),
    [
        ("cpu", {}, True),
        ("cuda", {}, False),
        ("cuda", {"max_lora_rank": 8}, True),
        ("cuda", {"max_lora_rank": 8, "enforce_eager": False}, False),
        ("cuda", {"enforce_eager": True}, True),
        ("cpu", {"enforce_eager": False}, False),
    ],
)
def test_cuda_graphs_are_the_default_on_a_gpu(
    device: Literal["cpu", "cuda"], arguments: dict[str, Any], is_eager: bool, tmp_path: Path
):
    """Adapters are served without: layers are taken out of the model after graphs would be captured."""
    strategy = EngineStrategy(strategy_config=VllmConfig.model_validate(arguments))
    config = GenerationConfig(device=device, strategy_args=strategy)
    assert engine_arguments(config, tmp_path, 64, 1)["enforce_eager"] is is_eager


@pytest.mark.parametrize(
    ("device", "given", "used"), [("cpu", 16, 32), ("cpu", 48, 64), ("cpu", None, 32), ("cuda", 16, 16)]
)
def test_a_cpu_has_cache_blocks_of_multiples_of_32(
    device: Literal["cpu", "cuda"], given: int | None, used: int, tmp_path: Path
):
    engine = VllmConfig.model_validate({} if given is None else {"block_size": given})
    config = GenerationConfig(device=device, strategy_args=EngineStrategy(strategy_config=engine))
    assert engine_arguments(config, tmp_path, 64, 1).get("block_size") == used


def test_an_eager_engine_on_a_cpu_normalizes_by_kernels():
    """A compiled one fuses the operations itself."""
    compiled = EngineStrategy(strategy_config=VllmConfig(enforce_eager=False))
    for config, is_used in (
        (GenerationConfig(device="cpu"), True),
        (GenerationConfig(device="cpu", strategy_args=compiled), False),
        (GenerationConfig(device="cuda"), False),
    ):
        assert ("ir_op_priority" in extension_arguments(config)) is is_used


def test_roles_keys_reach_the_engine(tmp_path: Path):
    """In ROLL's spelling where it has another."""
    table = {"model_args": {"dtype": "fp16"}, "strategy_args": {"strategy_config": {"tp_size": 2, "pp_size": 3}}}
    infer = canonicalize({"actor_infer": table})[0]["actor_infer"]
    arguments = engine_arguments(GenerationConfig.model_validate(infer), tmp_path, 64, 1)
    assert (arguments["dtype"], arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]) == (
        "float16",
        2,
        3,
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_experts_are_asked_for_in_the_way_that_the_device_takes(device: Literal["cpu", "cuda"], tmp_path: Path) -> None:
    """vLLM refuses its own argument on CPUs; a run's other settings of its kind are kept."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    given = {"enable_return_routed_experts": True, "additional_config": {"mine": 1}}
    config = GenerationConfig(device=device).with_engine(**given)
    arguments = engine_arguments(config, tmp_path, 512, 1)
    assert config.returns_routing
    if device == "cpu":
        assert "enable_return_routed_experts" not in arguments
        assert arguments["additional_config"] == {"mine": 1, "offbeat_records_routing": True}
    else:
        assert arguments["enable_return_routed_experts"] is True
        assert arguments["additional_config"] == {"mine": 1}
