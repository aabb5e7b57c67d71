# pyright: basic
import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offbeat.deploy.components.placement import list_nodes
from offbeat.deploy.config.device_plan import ClusterNode
from offbeat.deploy.config.run import RunConfig
from offbeat.services.gpu_memory import read_memory_gib, shares_memory
from offbeat.trainer.config.issue import ConfigIssue

logger = logging.getLogger(__name__)

KNOCK_TIMEOUT_S = 10.0
MEMORY_TIMEOUT_S = 10.0


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

    def with_memory(self) -> "Cluster":
        """Ask all nodes with GPUs, by a task on each; what gives no answer in time is unknown."""
        where = {
            _read_node.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)
            ).remote(): node.node_id
            for node in self.nodes
            if node.gpus and node.memory_gib is None
        }
        if not where:
            return self
        done, late = ray.wait(list(where), num_returns=len(where), timeout=MEMORY_TIMEOUT_S)
        for task in late:
            ray.cancel(task, force=True)
        answers = {where[task]: answer for task in done if (answer := _result_of(task)) is not None}
        nodes = tuple(node._replace(**answers.get(node.node_id, {})) for node in self.nodes)
        if unknown := [node.address for node in nodes if node.gpus and node.memory_gib is None]:
            logger.warning(
                "memory of the GPUs of %s unknown, and not checked: no nvidia-smi answered", ", ".join(unknown)
            )
        return replace(self, nodes=nodes)

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
            return cls.from_ray().with_memory()
        finally:
            ray.shutdown()


@ray.remote(num_cpus=0, max_retries=0)
def _read_node() -> dict[str, Any]:
    """Return fields of `ClusterNode`."""
    return {"memory_gib": read_memory_gib(), "shares_memory": shares_memory()}


def _result_of(task: Any) -> dict[str, Any] | None:
    try:
        return ray.get(task)
    except RayError:  # a node that died, or has no Offbeat of this build
        return None


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
