"""A curriculum over a real Redis: workers draw by what the learner taught, all members of a group alike."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from offbeat.envs.task_samplers import Levels
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.messages.types import GenerateRequest, Group
from offbeat.services.redis.connection import connect, connect_async
from offbeat.services.rollout.config import CustomEnv, EnvManagerConfig
from offbeat.services.rollout.worker import EnvWorker
from offbeat.trainer.learner.task_sampler import Curriculum
from tests.fakes_rollout import (
    HERE,
    FakeGeneration,
    FakeMetrics,
    worker_settings,
)
from tests.services.buffer.buffer_play import Run, limits, publish

LEVELS = {"at": 1.0, "window": 2, "review": 0.0}
TAGS = ("Easy", "Hard")


def tag(length: int) -> CustomEnv:
    """Succeeds if its `length` steps fit into five turns."""
    return CustomEnv(
        env_type=f"{HERE}CountingEnv",
        env_config={"length": length},
        max_steps=5,
        max_tokens_per_step=4,
        execution="inline",
    )


@pytest.fixture
async def run(redis_url: str, policy_folder: Path, chat: ChatFormat, tokenizer: Tokenizer) -> AsyncIterator[Run]:
    """Two workers play, by a curriculum from three steps to nine."""
    end = tokenizer.token_to_id("<|im_end|>")
    manager = {"group_size": 2, "task_sampler": {"path": "offbeat.envs.task_samplers:Levels", "args": LEVELS}}
    settings = worker_settings(
        policy_folder,
        custom_envs={"Easy": tag(3), "Hard": tag(9)},
        train_env_manager=EnvManagerConfig.model_validate(manager),
        worker_timeout_s=30.0,
    )

    def answer(_: GenerateRequest) -> tuple[int, ...]:
        return (end,)

    async_redis = connect_async(redis_url)
    with connect(redis_url) as redis:
        made = Run.begin(redis, async_redis, limits(max_groups_in_flight=2), step=-1)
        workers = [
            EnvWorker(
                settings,
                name,
                buffer=made.other_worker(),
                generation=FakeGeneration(answer),
                metrics=FakeMetrics(),
                chat=chat,
            )
            for name in ("a", "b")
        ]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        yield made
        for worker in workers:
            worker.stop()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*running)
    await async_redis.aclose()


async def taken(run: Run, count: int) -> list[Group]:
    groups = [await asyncio.to_thread(run.learner.take, 60.0) for _ in range(count)]
    assert all(group is not None and len(group.trajectories) == 2 for group in groups)
    return [group for group in groups if group is not None]


async def test_a_curriculum_advances_and_survives_a_learner_replacement(run: Run, tmp_path: Path) -> None:
    curriculum = Curriculum(Levels(TAGS, **LEVELS), run.learner)
    curriculum.publish()
    publish(run.redis, 0)
    groups = await taken(run, 4)
    assert {group.tag for group in groups} == {"Easy"}
    curriculum.observe(groups[:2])
    publish(run.redis, 1)
    assert {group.tag for group in await taken(run, 2)} == {"Hard"}
    curriculum.save(tmp_path)

    again = Curriculum(Levels(TAGS, **LEVELS), run.next_learner())
    again.load(tmp_path)
    again.publish()
    publish(run.redis, 2)
    newest = [group for group in await taken(run, 8) if group.number >= 6]
    assert [group.tag for group in newest] == ["Hard", "Hard"]
