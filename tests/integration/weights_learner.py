"""A learner that publishes without end, from a version on, until it is killed: `redis_url run_id folder epoch first`."""

import sys
from pathlib import Path

import redis
import torch

from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.publisher import RedisWeightPublisher
from tests.services.weights.publishing import give_lease


def main() -> None:
    url, run_id, folder, epoch, first = sys.argv[1:]
    server = redis.Redis.from_url(url)
    give_lease(server, run_id, int(epoch))
    publisher = RedisWeightPublisher(server, run_id, WeightsConfig(), int(epoch), Path(folder))
    version = int(first)
    while True:
        publisher.publish(version, version, [("w", torch.full((100_000,), float(version)))])
        version += 1


if __name__ == "__main__":
    main()
