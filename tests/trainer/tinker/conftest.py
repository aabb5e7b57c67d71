from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from redis import Redis

from offbeat.services.redis.connection import connect
from offbeat.trainer.tinker.adapters import AdapterPool
from tests.trainer.tinker.tiny_base import make_pool


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread: several would wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    with connect(redis_url) as redis:
        yield redis


@pytest.fixture
def pool(tmp_path: Path) -> AdapterPool:
    return make_pool(tmp_path / "base")
