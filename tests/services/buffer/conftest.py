"""A run's buffer on the session's real Redis."""

from collections.abc import AsyncIterator, Iterator

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from services.buffer.connection import connect, connect_async
from tests.services.buffer.buffer_play import Run


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
