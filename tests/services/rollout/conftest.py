import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.messages.types import (
    EpisodeTask,
)
from offbeat.services.rollout.actor import build_rewards
from offbeat.services.rollout.data.prompts import open_prompts
from offbeat.services.rollout.data.source import open_data
from offbeat.services.rollout.worker import EnvWorker
from tests.fakes_rollout import (
    FakeBuffer,
    FakeGeneration,
    FakeMetrics,
    worker_settings,
)
from tests.services.rollout.worker_bench import Bench, walker


@pytest.fixture
def bench(policy_folder: Path, chat: ChatFormat, tokenizer: Tokenizer):
    @contextlib.asynccontextmanager
    async def make(
        *tasks: EpisodeTask, generation: FakeGeneration | None = None, worker_id: str = "w", **changes: Any
    ) -> AsyncIterator[Bench]:
        settings = worker_settings(policy_folder, **changes)
        buffer, metrics = FakeBuffer(tasks), FakeMetrics()
        client = generation or FakeGeneration(walker(tokenizer))
        prompts = open_prompts(settings)
        services: dict[str, Any] = {"buffer": buffer, "generation": client, "metrics": metrics, "chat": chat}
        sources: dict[str, Any] = {"data": open_data(settings), "prompts": prompts}
        rewards = build_rewards(settings, prompts, chat)
        worker = EnvWorker(settings, worker_id, **services, **sources, rewards=rewards, clock=client.clock)
        made = Bench(worker, buffer, client, metrics)
        try:
            yield made
        finally:
            worker.stop()
            await asyncio.gather(made.running, return_exceptions=True)

    return make
