"""What vLLM finds in its environment."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from offbeat.services.generation.config import EngineStrategy, GenerationConfig, VllmConfig
from offbeat.services.generation.vllm.arguments import engine_arguments, engine_environment
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


def test_vllm_leaves_the_handlers_of_serve_alone():
    """Closed ones made Serve's controller take every engine for broken once it had been restarted."""

    def survive(environment: dict[str, str]) -> str:
        command = [sys.executable, "-c", HANDLERS_SURVIVE]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
        return done.stdout.split()[-1]

    assert survive(engine_environment(GenerationConfig())) == "True"


@pytest.mark.parametrize(
    ("device", "given", "used"), [("cpu", 16, 32), ("cpu", 48, 64), ("cpu", None, 32), ("cuda", 16, 16)]
)
def test_a_cpu_has_cache_blocks_of_multiples_of_32(
    device: Literal["cpu", "cuda"], given: int | None, used: int, tmp_path: Path
):
    engine = VllmConfig.model_validate({} if given is None else {"block_size": given})
    config = GenerationConfig(device=device, strategy_args=EngineStrategy(strategy_config=engine))
    assert engine_arguments(config, tmp_path, 64, 1).get("block_size") == used


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
