"""What vLLM finds in its environment."""

import os
import subprocess
import sys

import pytest

from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.vllm.engine import engine_environment

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
