"""The env workers as the reconciler keeps them, on a real Ray of several nodes: they hang, and their nodes die."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from offbeat.deploy.components import actor_pool, env_workers, ray_names
from offbeat.deploy.components.env_workers import WorkerPool
from offbeat.deploy.components.ray_actors import list_actor_names
from offbeat.deploy.config.loader import load_run
from offbeat.deploy.run_setup import prepare_folder
from offbeat.services.control.interfaces import Health, Observation
from offbeat.services.rollout.actor import worker_name
from tests.paths import QUICKSTART
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

WAIT_S = 120.0


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head on which no worker has room; nodes that have are joined by the test."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80_000_000})
    ray.init(address=cluster.address, namespace=ray_names.NAMESPACE, log_to_driver=False)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def join(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=2, object_store_memory=80_000_000)


class Reconciling:
    """What the reconciler does: look, and start what is missing or dead."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self.seen: list[Observation] = []

    async def ready(self) -> bool:
        seen = await self._pool.observe()
        self.seen.append(seen)
        if seen.health in (Health.ABSENT, Health.DEAD):
            await self._pool.ensure()
        return seen.health is Health.READY


def pid_of(run_id: str) -> int:
    actor: Any = ray.get_actor(worker_name(run_id, 0), namespace=ray_names.NAMESPACE)
    alive: Any = ray.get(actor.alive.remote(), timeout=60.0)
    return int(alive["pid"])


async def test_a_hung_or_lost_worker_is_restarted_where_there_is_room(
    cluster: Any, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_pool, "HANG_TIMEOUT_S", 8.0)
    config = load_run(QUICKSTART, [f"output_dir={tmp_path}", "exp_name=pool", "rollout.num_workers=1"])
    prepare_folder(config)
    run = Reconciling(WorkerPool(config, redis_url))
    node = join(cluster)
    await wait_until(run.ready, WAIT_S)
    first = pid_of("pool")

    os.kill(first, signal.SIGSTOP)
    await wait_until(lambda: _changed(run, first), WAIT_S)
    assert any("hung for" in each.detail for each in run.seen)
    second = pid_of("pool")
    assert second != first

    run.seen.clear()
    cluster.remove_node(node, allow_graceful=False)
    await wait_until(lambda: _away(run), WAIT_S)
    join(cluster)
    await wait_until(run.ready, WAIT_S)
    assert pid_of("pool") not in (first, second)
    assert any("hung for" in each.detail for each in run.seen)


async def test_surplus_workers_beyond_a_gap_of_their_numbers_are_stopped(
    cluster: Any, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 has exited; worker 2 hangs, and is killed after its grace time."""
    monkeypatch.setattr(env_workers, "STOP_GRACE_S", 3.0)
    config = load_run(
        QUICKSTART, [f"output_dir={tmp_path}", "exp_name=gap", "rollout.num_workers=3", "rollout.cpus_per_worker=0.25"]
    )
    prepare_folder(config)
    pool = WorkerPool(config, redis_url)
    join(cluster)
    await wait_until(Reconciling(pool).ready, WAIT_S)
    hung: Any = ray.get_actor(worker_name("gap", 2), namespace=ray_names.NAMESPACE)
    os.kill(int(ray.get(hung.alive.remote(), timeout=60.0)["pid"]), signal.SIGSTOP)
    ray.kill(ray.get_actor(worker_name("gap", 1), namespace=ray_names.NAMESPACE), no_restart=True)

    async def only_the_first_is_left() -> bool:
        await pool.resize(1)
        return [name for name in list_actor_names() if name.startswith("env-worker-gap-")] == [worker_name("gap", 0)]

    async def is_ready() -> bool:
        return (await pool.observe()).health is Health.READY

    await wait_until(only_the_first_is_left, WAIT_S)
    await wait_until(is_ready, WAIT_S)  # its answer may take longer than a look waits


async def _changed(run: Reconciling, pid: int) -> bool:
    return await run.ready() and pid_of("pool") != pid


async def _away(run: Reconciling) -> bool:
    return not await run.ready() and any("hung for" in each.detail for each in run.seen)
