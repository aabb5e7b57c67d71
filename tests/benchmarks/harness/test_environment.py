"""Configurations of benchmarks."""

import pytest

from offbeat.benchmarks.harness.environment import bench_environment
from offbeat.deploy.config import devices, loader
from offbeat.deploy.config.checks import devices as device_checks
from tests.paths import QUICKSTART

pytestmark = pytest.mark.slow


def test_a_benchmark_publishes_through_shared_memory_on_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `ipc` a version would go with the process that published it."""
    for module in (loader, device_checks):
        monkeypatch.setattr(module, "count_gpus", lambda: 1)
    monkeypatch.setattr(devices, "is_installed", lambda name: name == "vllm")
    assert loader.load_run(QUICKSTART).weights.transport == "ipc"
    with bench_environment() as base:
        config = base.run_config("bench")
    assert (config.actor_infer.device, config.actor_train.device, config.weights.transport) == ("cpu", "cpu", "shm")
