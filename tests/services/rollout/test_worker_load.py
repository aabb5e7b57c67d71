"""Workers play as many episodes as the engines' KV cache has room for."""

import asyncio
from collections.abc import Mapping

import pytest

from offbeat.services.messages.types import Completion, GenerateRequest
from offbeat.services.rollout.config import RolloutConfig
from offbeat.services.rollout.worker import EnvWorker
from offbeat.services.weights.replica_reports import ReplicaLoad
from tests.fakes_rollout import FakeBuffer, FakeGeneration, FakeMetrics, train_episode, worker_settings
from tests.services.rollout.worker_bench import walker
from tests.waiting import wait_until


class Loads:
    """Reports of one replica."""

    def __init__(self, tokens: int) -> None:
        self.now = ReplicaLoad(kv_usage=0.62, kv_tokens=tokens)
        self.reads = 0

    async def __call__(self) -> Mapping[str, ReplicaLoad]:
        self.reads += 1
        return {"r0": self.now}


@pytest.mark.parametrize(("room", "most"), [(3, 3), (100, 12)])
async def test_as_many_episodes_are_played_as_fit(policy_folder, chat, tokenizer, monkeypatch, room: int, most: int):
    monkeypatch.setattr("offbeat.services.rollout.worker.LOAD_INTERVAL_S", 0.01)
    settings = worker_settings(policy_folder, rollout=RolloutConfig(kv_usage_target=0.7, max_env_num_per_worker=12))
    buffer = FakeBuffer()
    loads, generation = Loads(room * settings.sequence_length), FakeGeneration(walker(tokenizer))
    worker = EnvWorker(
        settings, "w", buffer=buffer, generation=generation, metrics=FakeMetrics(), chat=chat, read_loads=loads
    )
    running = asyncio.create_task(worker.run())
    seen: list[int] = []
    try:
        await wait_until(lambda: loads.reads > 1)
        buffer.offer(*(train_episode(number, index) for number in range(6) for index in range(4)))
        while len(buffer.submitted) < 24:
            seen.append(len(buffer.claimed) - len(buffer.submitted))
            await asyncio.sleep(0.001)
    finally:
        worker.stop()
        await running
    assert max(seen) == most


class RefusingGeneration(FakeGeneration):
    """Refuses each turn after its delay."""

    def _complete(self, request: GenerateRequest) -> Completion:
        return Completion(request.request_id, error="refused")


async def test_episodes_that_fail_do_not_raise_the_limit(policy_folder, chat, tokenizer, monkeypatch):
    """They end much sooner than others, and an engine without load says nothing of what those will need."""
    monkeypatch.setattr("offbeat.services.rollout.worker.LOAD_INTERVAL_S", 0.01)
    monkeypatch.setattr("offbeat.services.rollout.worker.REPORT_INTERVAL_S", 0.01)
    settings = worker_settings(policy_folder, rollout=RolloutConfig(kv_usage_target=0.7, max_env_num_per_worker=12))
    buffer, metrics = FakeBuffer(), FakeMetrics()
    buffer.retries = True
    generation = RefusingGeneration(walker(tokenizer), lambda _: 0.03)
    loads = Loads(3 * settings.sequence_length)
    loads.now = ReplicaLoad(kv_usage=0.0, kv_tokens=loads.now.kv_tokens)
    worker = EnvWorker(
        settings, "w", buffer=buffer, generation=generation, metrics=metrics, chat=chat, read_loads=loads
    )
    running = asyncio.create_task(worker.run())
    try:
        buffer.offer(*(train_episode(number, index) for number in range(6) for index in range(4)))
        await wait_until(lambda: len(buffer.failed) > 60)
    finally:
        worker.stop()
        await running
    assert not buffer.submitted
    limits = [part.value for record in metrics.records if (part := record.values.get("episode_limit"))]
    assert max(limits) == 3
