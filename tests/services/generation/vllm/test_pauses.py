"""When the engine takes vLLM for paused."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.vllm.engine import VllmEngine


class PausedCore:
    """vLLM that is paused, with steps in flight until `drained`."""

    def __init__(self, concurrent: int) -> None:
        cache = SimpleNamespace(block_size=1, num_gpu_blocks=8)
        self.vllm_config = SimpleNamespace(max_concurrent_batches=concurrent, cache_config=cache)
        self.model_config = SimpleNamespace(max_model_len=8, get_vocab_size=lambda: 8)
        self.drained = asyncio.Event()

    async def pause_generation(self, **_: Any) -> None:
        await self.drained.wait()

    async def is_paused(self) -> bool:
        await asyncio.sleep(0)
        return True


@pytest.mark.parametrize(("concurrent", "waits"), [(1, False), (2, True), (4, True)])
async def test_a_pause_waits_for_steps_in_flight(concurrent: int, waits: bool):
    """Asynchronous scheduling and pipeline stages have some; their tokens are of the weights before."""
    core = PausedCore(concurrent)
    pausing = asyncio.create_task(VllmEngine(core, GenerationConfig()).pause())
    for _ in range(100):
        await asyncio.sleep(0)
    assert pausing.done() is not waits
    core.drained.set()
    await pausing
