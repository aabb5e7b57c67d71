"""Rank 0 of `algorithm_rank`, with the other rank on this node or, given a Redis, on another one."""

import os
import sys
from pathlib import Path

from offbeat.trainer.process.rank_processes import start_followers
from offbeat.trainer.process.remote_ranks import RemoteRanks
from tests.integration.algorithm_rank import main

RUN = "rendezvous"

if __name__ == "__main__":
    model, out, redis_url = sys.argv[1:]
    os.environ.pop("WORLD_SIZE", None)
    follower = [sys.executable, str(Path(__file__).with_name("algorithm_rank.py")), model, out]
    others = RemoteRanks(redis_url, RUN, (1, 1)) if redis_url else None
    with start_followers(2, follower, 60.0, others):
        main(Path(model), Path(out))
