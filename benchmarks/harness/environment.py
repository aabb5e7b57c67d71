"""Environment of a benchmark: folder, redis-server, tiny policy; removed afterwards, with `/dev/shm`."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redis import Redis

from offbeat.benchmarks.harness.leftovers import clean_up_on_exit
from offbeat.deploy.config.loader import load_run
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.run_setup import prepare_folder, worker_settings
from offbeat.services.buffer.admin import configure_buffer
from offbeat.services.buffer.api import BufferLimits
from offbeat.services.buffer.config import RedisConfig
from offbeat.services.keys import RunKeys
from offbeat.services.redis.connection import connect
from offbeat.services.redis.server import EmbeddedRedis
from offbeat.services.rollout.config import (
    CustomEnv,
    EnvManagerConfig,
    RolloutConfig,
    WorkerSettings,
)
from offbeat.trainer.run import buffer_limits

QUICKSTART = Path(__file__).parents[2] / "deploy/configs/quickstart.yaml"
TAG = "FrozenLake"
ON_CPUS = ("actor_train.device=cpu", "actor_infer.device=cpu")
"""Also where a run would take GPUs."""
WORKER_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class BenchEnvironment:
    folder: Path
    redis_url: str
    redis: Redis
    server_pid: int

    def run_config(self, run_id: str, **changes: Any) -> RunConfig:
        """Return the quickstart on CPUs with `changes` to top-level keys."""
        config = load_run(QUICKSTART, ON_CPUS)
        return config.model_copy(update={"exp_name": run_id, "output_dir": self.folder / run_id, **changes})

    def prepare(self, config: RunConfig, *, spare_steps: float = 0.0) -> int:
        """Create a run; return its epoch. spare_steps: admitted beyond `max_steps`."""
        prepare_folder(config)
        limits = buffer_limits(config)
        configure_buffer(self.redis, config.exp_name, _with_spare(limits, spare_steps))
        return int(self.redis.incr(RunKeys(config.exp_name).epoch))  # pyright: ignore[reportArgumentType]

    def worker_settings(self, config: RunConfig) -> WorkerSettings:
        return worker_settings(config, self.redis_url, timeout_s=WORKER_TIMEOUT_S)


@contextmanager
def bench_environment() -> Iterator[BenchEnvironment]:
    """Yield the environment; Redis syncs its append-only file every second."""
    with (
        tempfile.TemporaryDirectory(prefix="offbeat-bench-") as name,
        clean_up_on_exit(Path(name)) as folder,
        EmbeddedRedis(folder / "redis", RedisConfig()) as server,
        connect(server.url) as redis,
    ):
        assert server.pid is not None
        yield BenchEnvironment(folder, server.url, redis, server.pid)


def slow_lake(latency: dict[str, Any], *, max_steps: int = 12) -> CustomEnv:
    """Return FrozenLake with step latency (fields of `Latency`)."""
    return CustomEnv(
        env_type="offbeat.benchmarks.harness.slow_lake:SlowLake",
        max_steps=max_steps,
        max_tokens_per_step=4,
        execution="thread",
        env_config={"size": 4, "p": 0.7, "latency": latency},
    )


def manager(groups: int, group_size: int, *, redundancy: int = 0) -> EnvManagerConfig:
    return EnvManagerConfig(tags=(TAG,), num_env_groups=groups, group_size=group_size, group_size_redundancy=redundancy)


def worker(episodes: int, *, spare_threads: int = 0) -> RolloutConfig:
    """Return one worker. spare_threads: for cancelled, sleeping episodes."""
    return RolloutConfig(max_env_num_per_worker=episodes, num_threads=episodes + spare_threads)


def _with_spare(limits: BufferLimits, spare_steps: float) -> BufferLimits:
    return replace(limits, total_groups=limits.total_groups + int(spare_steps * limits.groups_per_step))
