"""Program on a cluster of two nodes with three logical GPUs each: writes which devices engines and learner get."""

import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import serve
from redis import Redis

from offbeat.deploy.components.learner import ManagedLearner
from offbeat.deploy.components.placement import list_nodes, place
from offbeat.deploy.config.loader import canonical_tree, validate_tree
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.run_setup import run_spec
from offbeat.services.control.store import RunStore
from offbeat.services.devices import VISIBLE, EngineDevices
from offbeat.services.keys import RunKeys
from offbeat.services.placement import claim_devices, deployment_options
from offbeat.services.redis.connection import connect_async
from offbeat.trainer.engines.node_ranks import RANKS_PER_NODE, NodeRanks
from offbeat.trainer.process.remote_ranks import RemoteRanks
from tests.waiting import wait_until_sync

RUN = "mapped"
RESULT = "devices.json"
START_TIMEOUT_S = 150.0
"""Longest start of a node, of replicas or of ranks, beside other tests."""


class Engine:
    def __init__(self, slots: tuple[EngineDevices, ...]) -> None:
        self._claim = claim_devices(slots, "engine")

    async def where(self) -> tuple[str, str]:
        return ray.get_runtime_context().get_node_id(), os.environ[VISIBLE]


def make_config(folder: Path, url: str) -> RunConfig:
    tree: dict[str, Any] = {
        "exp_name": RUN,
        "output_dir": str(folder / RUN),
        "custom_envs": {"A": {"env_type": "frozen_lake"}},
        "redis": {"url": url},
        "actor_train": {"device": "cuda", "device_mapping": [1, 3]},
        "actor_infer": {"device": "cuda", "device_mapping": "list(range(2)) + [4]", "cpus_per_replica": 0.1},
        "critic": {"device_mapping": [5]},
        "adv_estimator": "gae",
        "reward_normalization": {"method": "identity"},
    }
    return validate_tree(canonical_tree(tree))


def engines(config: RunConfig) -> list[tuple[str, str]]:
    slots = place(config).engines
    options = deployment_options(cpus=config.actor_infer.cpus_per_replica, gpus=1, slots=slots)
    deployment = serve.deployment(name="engine", num_replicas=3, **options)
    handle = serve.run(deployment(Engine).bind(slots), name="engines", route_prefix=None)
    found: set[tuple[str, str]] = set()
    deadline = time.monotonic() + START_TIMEOUT_S
    while len(found) < 3 and time.monotonic() < deadline:
        found.add(tuple(handle.where.remote().result()))
    return sorted(found)


def ranks(config: RunConfig, redis: Redis, url: str) -> dict[str, dict[str, str]]:
    """Return the environment of each rank's process: of rank 0 until it ends, as it finds no real GPU."""
    uid = redis.hget(RunKeys(RUN).record, "uid")
    assert isinstance(uid, bytes)
    learner = ManagedLearner(config, redis, url, uid.decode())
    learner._start()
    world = RemoteRanks(url, RUN, (NodeRanks(1), NodeRanks(1, 1)))
    world.open(1)
    names = (VISIBLE, RANKS_PER_NODE, "RANK", "LOCAL_RANK", "WORLD_SIZE")
    found: dict[str, dict[str, str]] = {}
    deadline = time.monotonic() + START_TIMEOUT_S
    while len(found) < 3 and time.monotonic() < deadline:
        for process in psutil.process_iter():
            try:
                if "offbeat.trainer.cli" in process.cmdline() and RUN in process.cmdline():
                    environment = process.environ()
                    if "OFFBEAT_REDIS" in environment:
                        rank = environment.get("RANK", "0")
                        found[rank] = {name: environment[name] for name in names if name in environment}
            except psutil.Error:
                continue
    world.close()
    return found


async def create_record(config: RunConfig, url: str) -> None:
    async with connect_async(url) as redis:
        await RunStore(redis).create(run_spec(config))


def main(folder: Path, url: str) -> None:
    import asyncio

    ray.init(address="auto", namespace="offbeat", log_to_driver=False)
    wait_until_sync(lambda: len(list_nodes()) == 2, timeout_s=START_TIMEOUT_S)
    config = make_config(folder, url)
    asyncio.run(create_record(config, url))
    nodes = [node.node_id for node in sorted(list_nodes(), key=lambda node: node[1::-1])]
    with Redis.from_url(url) as redis:
        result = {"nodes": nodes, "engines": engines(config), "ranks": ranks(config, redis, url)}
    result["free"] = ray.available_resources().get("GPU", 0.0)
    (folder / RESULT).write_text(json.dumps(result))
    serve.shutdown()


if __name__ == "__main__":
    import sys

    main(Path(sys.argv[1]), sys.argv[2])
