"""Rank 0 of `algorithm_rank`, which meets the other rank, as on another node, through Redis."""

import os
import sys
from pathlib import Path

from offbeat.trainer.engines.node_ranks import NodeRanks
from offbeat.trainer.process.rank_processes import start_followers
from offbeat.trainer.process.remote_ranks import RemoteRanks
from tests.integration.algorithm_rank import main

RUN = "rendezvous"

if __name__ == "__main__":
    model, out, redis_url = sys.argv[1:]
    os.environ.pop("WORLD_SIZE", None)
    with start_followers(2, [], 60.0, RemoteRanks(redis_url, RUN, (NodeRanks(1), NodeRanks(1)))):
        main(Path(model), Path(out))
