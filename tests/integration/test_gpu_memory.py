"""Memory of the GPUs of a real Ray's nodes, read on each; a program stands for the driver's `nvidia-smi`."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster

from offbeat.deploy.cluster import size
from offbeat.deploy.cluster.size import Cluster
from offbeat.deploy.config.sharing import choose_turns
from offbeat.deploy.config.transport import choose_transport
from tests.deploy.config.checks.test_devices import write_model
from tests.deploy.config.test_device_plan import config

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def cluster() -> Iterator[Any]:
    cluster = RayCluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80_000_000})
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def join(cluster: Any, folder: Path, script: str) -> None:
    """Join a node with two GPUs whose `nvidia-smi` is a shell script."""
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    cluster.add_node(num_cpus=0, num_gpus=2, object_store_memory=80_000_000, env_vars={"PATH": path})


def chosen_transports(cluster: Cluster, folder: Path) -> dict[float | None, str]:
    """Return the transports of runs on each node's first GPU by its memory: of 1.4 GiB of weights, three versions."""
    pretrain, found = write_model(folder, 750_000_000), dict[float | None, str]()
    nodes = [node for node in sorted(cluster.nodes, key=lambda each: each[1::-1]) if node.gpus]
    for number, node in enumerate(nodes):
        on_first = {"device_mapping": [2 * number]}
        run = choose_turns(config(on_first, on_first, pretrain=pretrain, max_staleness=0), cluster.nodes)
        found[node.memory_gib] = choose_transport(run, cluster.nodes).weights.transport
    return found


def test_the_memory_of_other_nodes_is_read_on_them(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two nodes answer, the smallest GPU counts; one has a broken driver; one hangs, and is not waited for."""
    for name, script in (
        ("large", "echo 81920; echo 81920"),
        ("mixed", "echo 24576; echo 16384"),
        ("broken", "exit 9"),
    ):
        join(cluster, tmp_path / name, script)
    cluster.wait_for_nodes()
    monkeypatch.setattr(size, "MEMORY_TIMEOUT_S", 120.0)
    measured = Cluster.from_ray().with_memory()
    assert sorted((node.gpus, node.memory_gib or 0.0) for node in measured.nodes) == [
        (0, 0.0), (2, 0.0), (2, 16.0), (2, 80.0)
    ]  # fmt: skip
    assert chosen_transports(measured, tmp_path) == {80.0: "ipc", 16.0: "shm", None: "ipc"}
    (warned,) = (record.getMessage() for record in caplog.records if record.name == size.__name__)
    assert warned.startswith("memory of the GPUs of ")
    earlier = {node.node_id for node in measured.nodes}
    join(cluster, tmp_path / "hanging", "sleep 60")
    cluster.wait_for_nodes()
    monkeypatch.setattr(size, "MEMORY_TIMEOUT_S", 5.0)
    start = time.monotonic()
    measured = Cluster.from_ray().with_memory()
    assert time.monotonic() - start < 30
    (hanging,) = (node for node in measured.nodes if node.node_id not in earlier)
    assert (hanging.gpus, hanging.memory_gib) == (2, None)
