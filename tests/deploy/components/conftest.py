from collections.abc import Iterator

import pytest
from redis import Redis


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url) as client:
        yield client
