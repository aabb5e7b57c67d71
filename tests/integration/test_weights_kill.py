"""A learner is killed while it publishes, again and again: replicas always find whole weights, and versions only grow."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.asyncio import Redis as AsyncRedis
from safetensors.torch import load_file

from offbeat.services.errors import WeightsError
from offbeat.services.keys import RunKeys
from offbeat.services.weights.broker import UNANNOUNCED_TTL_S, WeightBroker
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.subscriber import RedisWeightSubscriber
from offbeat.services.weights.transports.base import owner_of
from offbeat.services.weights.transports.factory import cleanup
from offbeat.services.weights.transports.shm import SharedMemoryTransport

RUN = f"kill-{os.getpid()}"
LEARNER = Path(__file__).with_name("weights_learner.py")


@pytest.fixture
def server(redis_url: str, tmp_path: Path) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client
    cleanup(RUN, WeightsConfig(), tmp_path)


async def test_a_kill_while_publishing_leaves_complete_weights(
    server: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    """The successor resumes."""
    async with AsyncRedis.from_url(redis_url) as connection:
        subscriber = RedisWeightSubscriber(connection, RUN, WeightsConfig(), tmp_path)
        served = -1
        for epoch in (1, 2, 3):
            server.set(RunKeys(RUN).epoch, epoch)
            first = max(0, served - 5)
            learner = start_learner(redis_url, tmp_path, epoch, first)
            try:
                goal = served + 30
                while served < goal:
                    manifest = await subscriber.wait_newer(served, 240.0)
                    assert manifest is not None, "no newer version came"
                    assert manifest.version > served
                    served = await newest_whole(subscriber)
            finally:
                learner.kill()
                learner.wait()
            served = max(served, await newest_whole(subscriber))
        server.incr(RunKeys(RUN).epoch)
        files = SharedMemoryTransport(owner_of(RUN, tmp_path)).stored()
        broker = WeightBroker(
            connection, RUN, WeightsConfig(), tmp_path, clock=lambda: time.time() + UNANNOUNCED_TTL_S + 1
        )
        assert await broker.collect() == len(files) - 2
    assert len(SharedMemoryTransport(owner_of(RUN, tmp_path)).stored()) == 2


def start_learner(redis_url: str, folder: Path, epoch: int, first: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(LEARNER), redis_url, RUN, str(folder), str(epoch), str(first)]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.getcwd()})


async def newest_whole(subscriber: RedisWeightSubscriber) -> int:
    """Load the newest version, which may be collected meanwhile by a learner that runs ahead."""
    while True:
        manifest = await subscriber.newest()
        assert manifest is not None
        try:
            async with subscriber.fetch(manifest) as path:
                assert load_file(path)["w"].unique().tolist() == [float(manifest.version)]
                return manifest.version
        except WeightsError as error:
            if "is gone" not in str(error):
                raise
