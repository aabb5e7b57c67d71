from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.hf.engine import HfEngine
from tests.integration.policy_weights import write_policy
from tests.services.generation.hf.policies import CONFIG, CONTEXT, Policies, Start


@pytest_asyncio.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    engines: list[HfEngine] = []

    async def start(config: GenerationConfig = CONFIG, seed: int = 1) -> Policies:
        folder = write_policy(tmp_path)
        engines.append(await HfEngine.start(config, folder, sequence_length=CONTEXT, seed=seed))
        return Policies(engines[-1], folder)

    yield start
    for engine in engines:
        engine.close()
