"""Fixtures of the services: a run's buffer on the session's real Redis, the tiny policy's chat format, chat templates."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from tokenizers import Tokenizer

from offbeat.envs.frozen_lake import WORDS
from offbeat.services.chat.append_only import ChatFormat, load_chat_format
from offbeat.services.chat.template import ChatTemplate
from offbeat.services.redis.connection import connect, connect_async
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.services.buffer.buffer_play import Run
from tests.services.gateway.templates import FORGETS_THOUGHTS, HERMES, PLAIN, chat_template


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    with connect(redis_url) as client:
        yield client


@pytest.fixture
async def async_redis(redis_url: str) -> AsyncIterator[AsyncRedis]:
    client = connect_async(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
async def run(redis: Redis, async_redis: AsyncRedis) -> Run:
    """Weights 0 are published, nothing is admitted."""
    return Run.begin(redis, async_redis)


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    write_tiny_policy(folder, TinyPolicyConfig(), WORDS)
    return folder


@pytest.fixture(scope="session")
def tokenizer(policy_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(policy_folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def chat(policy_folder: Path) -> ChatFormat:
    return load_chat_format(policy_folder)


@pytest.fixture(scope="session")
def hermes() -> ChatTemplate:
    return chat_template(HERMES)


@pytest.fixture(scope="session")
def plain() -> ChatTemplate:
    return chat_template(PLAIN)


@pytest.fixture(scope="session")
def forgetful() -> ChatTemplate:
    return chat_template(FORGETS_THOUGHTS)
