# pyright: basic
import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import ray

from offbeat.deploy.components.placement import list_nodes
from offbeat.deploy.config.device_plan import ClusterNode
from offbeat.deploy.config.run import RunConfig
from offbeat.trainer.config.issue import ConfigIssue

KNOCK_TIMEOUT_S = 10.0


class NoClusterError(Exception):
    """No Ray cluster can be joined at an address."""


@dataclass(frozen=True, slots=True)
class Cluster:
    cpus: float
    nodes: tuple[ClusterNode, ...]
    hosts: int

    @classmethod
    def from_ray(cls) -> "Cluster":
        resources = ray.cluster_resources()
        hosts = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
        return cls(resources.get("CPU", 0.0), tuple(list_nodes()), len(hosts))

    @classmethod
    def at(cls, address: str) -> "Cluster":
        """Join the cluster at `address` (`auto`: this machine's) and measure it; raises `NoClusterError`."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            if address != "auto":
                _knock(address)  # Ray itself tries for two minutes
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray raises ConnectionError, RuntimeError, ValueError or an error of its own
            reason = str(error).strip().partition("\n")[0]
            raise NoClusterError(f"no Ray cluster can be joined at {address}: {reason}") from error
        try:
            return cls.from_ray()
        finally:
            ray.shutdown()


def _knock(address: str) -> None:
    """Raise `OSError` or `ValueError` unless `HOST:PORT` accepts connections."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise ValueError("expected HOST:PORT")
    socket.create_connection((host, int(port)), timeout=KNOCK_TIMEOUT_S).close()


def check_hosts(config: RunConfig, cluster: Cluster) -> Iterator[ConfigIssue]:
    """Yield a transport that does not reach all hosts."""
    if config.uses_engine and cluster.hosts > 1 and config.weights.transport == "shm":
        yield ConfigIssue(
            "weights.transport",
            f"shm reaches one host, and this cluster has {cluster.hosts}: use fs, with weights.url set to a folder or "
            "bucket that all of them reach",
        )
