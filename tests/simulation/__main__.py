"""`make simulate`: seeds of the protocol's simulation, each against a Redis of this process."""

import argparse
import logging
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

from offbeat.services.buffer.config import RedisConfig
from offbeat.services.redis.connection import connect
from offbeat.services.redis.server import EmbeddedRedis
from tests.simulation.walk import SimulationError, draw, simulate
from tests.simulation.whole_learner import BrokenLifeError, live


def main() -> int:
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--seed", type=int, help="play this one alone, and print its events")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--minutes", type=float, default=60.0, help="time to spend")
    options = parser.parse_args()
    logging.disable()  # of warnings about each fault
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedRedis(Path(folder), RedisConfig()) as server,
        connect(server.url) as redis,
    ):
        num_played, ends_at = 0, time.monotonic() + options.minutes * 60
        for seed in count(options.first) if options.seed is None else [options.seed]:
            if num_played and time.monotonic() > ends_at:
                break
            try:
                result = simulate(redis, server.url, seed)
                happened = live(redis, server.url, seed)
            except (SimulationError, BrokenLifeError) as error:
                sys.stdout.write(f"{error}\n")
                return 1
            num_played += 1
            if options.seed is not None:
                settings, events = draw(seed)
                sys.stdout.write(
                    "\n".join([str(settings), *map(str, events), result, f"whole learners: {dict(happened)}", ""])
                )
    first = options.first if options.seed is None else options.seed
    sys.stdout.write(f"{num_played} seeds from {first} on: all hold\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
