"""An engine of a small model, and three sets of weights for it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offbeat.services.generation.config import EngineModelArgs, EngineStrategy, GenerationConfig, VllmConfig
from offbeat.services.generation.hf.engine import HfEngine
from offbeat.services.messages.types import Completion, GenerateRequest, Sampling
from tests.integration.policy_weights import random_policy, save_weights

FLOAT_NOISE = 1e-5


CONTEXT = 512


PROMPT = tuple(range(4, 28)) * 4


CONFIG = GenerationConfig(model_args=EngineModelArgs(dtype="float32"), kv_cache_gib=0.25)


def config_of(**changes: Any) -> GenerationConfig:
    return CONFIG.model_copy(update=changes)


def with_arguments(**arguments: Any) -> EngineStrategy:
    return EngineStrategy(strategy_name="hf_infer", strategy_config=VllmConfig(**arguments))


class Policies:
    """Three sets of weights, and an engine that serves one of them."""

    def __init__(self, engine: HfEngine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.models = [random_policy(folder, seed) for seed in range(3)]
        self.files = [save_weights(model, folder / f"{i}.safetensors") for i, model in enumerate(self.models)]
        self.version = -1
        self._requests = 0

    async def load(self, index: int) -> int:
        await self.engine.stage(self.files[index])
        self.version += 1
        await self.engine.load(self.files[index], self.version)
        return self.version

    def request(self, prompt: tuple[int, ...], **sampling: Any) -> GenerateRequest:
        self._requests += 1
        return GenerateRequest(f"r{self._requests}", prompt, Sampling(**sampling))

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self.engine.generate(request, self.version)

    async def play(self, prompts: list[tuple[int, ...]], **sampling: Any) -> list[tuple[GenerateRequest, Completion]]:
        requests = [self.request(prompt, **sampling) for prompt in prompts]
        return list(zip(requests, await asyncio.gather(*map(self.generate, requests)), strict=True))

    @property
    def reused(self) -> int:
        return self.engine.reused_tokens


Start = Callable[..., Any]
