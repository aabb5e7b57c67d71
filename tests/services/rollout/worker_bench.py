"""A worker between fakes, for its tests."""

import asyncio
from typing import Any

from tokenizers import Tokenizer

from offbeat.services.messages.types import (
    EpisodeTask,
    GenerateRequest,
)
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.worker import EnvWorker, WorkerEnd
from tests.fakes_rollout import (
    HERE,
    FakeBuffer,
    FakeGeneration,
    FakeMetrics,
    train_episode,
)
from tests.waiting import wait_until


def walker(tokenizer: Tokenizer):
    """Answers each prompt in a way that depends on the prompt alone."""
    ids = [tokenizer.token_to_id(word) for word in ("Left", "Down", "Right", "Up")]
    end = tokenizer.token_to_id("<|im_end|>")

    def answer(request: GenerateRequest) -> tuple[int, ...]:
        return (ids[sum(request.prompt) % 4], end)

    return answer


def custom(env: str, execution: str = "inline", **changes: Any) -> CustomEnv:
    rules = {"max_steps": 5, "max_tokens_per_step": 4, **changes}
    return CustomEnv(env_type=HERE + env, execution=execution, **rules)


class Bench:
    """A worker with fakes around it, and its running loop."""

    def __init__(self, worker: EnvWorker, buffer: FakeBuffer, generation: FakeGeneration, metrics: FakeMetrics) -> None:
        self.worker = worker
        self.buffer = buffer
        self.generation = generation
        self.metrics = metrics
        self.running: asyncio.Task[WorkerEnd] = asyncio.create_task(worker.run())

    async def until_done(self, count: int) -> None:
        await wait_until(lambda: len(self.buffer.submitted) + len(self.buffer.failed) >= count or self.running.done())
        if self.running.done():
            self.running.result()


def group(number: int, size: int = 4) -> list[EpisodeTask]:
    return [train_episode(number, index) for index in range(size)]
