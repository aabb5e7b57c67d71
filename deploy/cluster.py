# pyright: basic
"""The wiring of a control service that was brought up by `serve deploy`: it does alone what `offbeat train` does around one.

Invariants: a run's relative paths start from one folder, whoever sent it; a run is checked against the cluster that will run
it, not against the host of the control service.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from redis.asyncio import Redis as AsyncRedis

from deploy.config import RunConfig
from deploy.loading import load_document
from deploy.mesh import RunParts, Wiring
from deploy.problems import ConfigError, Problem
from deploy.warden import keep_warden
from services.buffer.watch import BufferWatch
from services.control.records import RunRecord


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a Ray cluster has."""

    cpus: float
    gpus: float
    hosts: int

    @classmethod
    def of_ray(cls) -> "Cluster":
        """The one that this process belongs to."""
        resources = ray.cluster_resources()
        hosts = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
        return cls(resources.get("CPU", 0.0), resources.get("GPU", 0.0), len(hosts))


class ClusterWiring(Wiring):
    """What `services.control.app` asks of this project on a cluster that outlives its runs."""

    def __init__(self, redis: AsyncRedis, redis_url: str, working_dir: Path | None) -> None:
        super().__init__(redis, redis_url, working_dir or Path.cwd())
        keep_warden()

    def load(self, document: str | dict[str, Any]) -> RunConfig:
        """See `Wiring.load`."""
        cluster = Cluster.of_ray()
        config = load_document(document, cores=cluster.cpus, gpus=cluster.gpus, working_dir=self._working_dir)
        problems = list(cluster_problems(config, cluster, self._redis_url))
        if problems:
            raise ConfigError(problems)
        return config

    def build_mesh(self, record: RunRecord) -> RunParts:
        """See `Wiring.build_mesh`; nobody else has made room for the run."""
        config = RunConfig.model_validate_json(record.config)
        watch = BufferWatch(self._async_redis, record.run_id)
        claim = f"{record.run_id} {record.created_at}"
        return RunParts(config, self._redis, watch, self._redis_url, self._serve_status, claim=claim)


def cluster_problems(config: RunConfig, cluster: Cluster, redis_url: str) -> Iterator[Problem]:
    """What can't work on this cluster, or would be passed over here."""
    if config.redis.url not in (None, redis_url):
        yield Problem("redis.url", "the runs of a deployed mesh live in its own Redis: leave it out")
    if cluster.hosts > 1 and config.weights.transport == "shm":
        yield Problem(
            "weights.transport",
            f"shm reaches one host, and this cluster has {cluster.hosts}: take fs (weights.url names a folder or bucket "
            "that all of them reach)",
        )
