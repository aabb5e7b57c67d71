"""`offbeat bench scale`: what an episode costs when one env worker plays 16 to 4,096 of them at a time.

Real: Redis with its append-only file, the buffer, the env worker, FrozenLake. The policy is a script that answers each turn
after a given time. CPU is that of the worker's process and of Redis; whoever takes the groups out is not counted.

Invariant: a measurement begins when every place has finished an episode, so that starts and ends are mixed as in a long run.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from deploy.bench.ground import TAG, Ground, ground, manager, slow_lake
from deploy.bench.outcome import Spread, console, show
from deploy.bench.rollouts import PolicySpec, Rollouts
from deploy.config import RunConfig
from services.buffer.learner import RedisLearnerBuffer
from services.keys import RunKeys
from services.rollout.config import CustomEnv, RolloutConfig

GROUP_SIZE = 8
WARM_UP = 64
"""Episodes at a time of a setting that is not reported."""
ENDLESS = 10**6
"""Steps: no run ends, and with it what is played, while it is measured."""
FLAT = 0.2
"""What the issue allows between the cheapest and the dearest setting."""

_NUMBERS = itertools.count()
"""Of runs: no two settings share one."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured; times in seconds."""

    concurrency: tuple[int, ...] = (16, 64, 256, 1024, 4096)
    answer_s: float = 0.05
    """Of the scripted policy for one turn."""
    coalesce_s: float = 0.01
    """See `rollout.coalesce_s`; 0 with answers at once keeps the worker busy, however few it plays."""
    window_s: float = 4.0
    """At least; a window lasts until as many episodes ended as are played at a time, because they end in waves."""
    rounds: int = 3
    """Windows of each setting."""


@dataclass(frozen=True, slots=True)
class Look:
    """Totals at a moment."""

    at: float
    trajectories: int
    worker_cpu_s: float
    redis_cpu_s: float


def run(options: Options) -> dict[str, Any]:
    """Measure everything and show it; returns what goes into the JSON."""
    with console().status("starting") as status, ground() as base:
        first = base.run_config("bench-first", custom_envs={TAG: slow_lake({})})
        base.prepare(first)
        policy = PolicySpec("client", delay_s=options.answer_s)
        rows: list[dict[str, Any]] = []
        with Rollouts(policy, first.output_dir / "policy", sequence_length=first.sequence_length) as rollouts:
            _Setting(replace(options, rounds=1), base, rollouts, WARM_UP).measure()  # imports, caches, connections
            for count in options.concurrency:
                status.update(f"{count} episodes at a time")
                rows.append(_Setting(options, base, rollouts, count).measure())
    cost = [row["cpu_ms"].median for row in rows]
    spread = max(cost) / min(cost) - 1
    _show(rows, spread)
    return {"settings": rows, "cost_spread": spread, "flat": spread <= FLAT}


class _Setting:
    """One number of episodes at a time."""

    def __init__(self, options: Options, base: Ground, rollouts: Rollouts, count: int) -> None:
        self._options = options
        self._ground = base
        self._rollouts = rollouts
        self._count = count
        self._redis = psutil.Process(base.server_pid)
        self._taken = 0

    def measure(self) -> dict[str, Any]:
        config = self._config()
        epoch = self._ground.prepare(config)
        self._publish(config)
        self._buffer = RedisLearnerBuffer(self._ground.redis, config.exp_name, epoch)
        idle_bytes = psutil.Process(self._rollouts.pid).memory_info().rss
        self._rollouts.play(self._ground.worker_settings(config))
        self._take_until(lambda: self._taken >= self._count)
        looks = [self._look()]
        for _ in range(self._options.rounds):
            end, count = time.monotonic() + self._options.window_s, self._taken + self._count
            self._take_until(lambda end=end, count=count: time.monotonic() >= end and self._taken >= count)
            looks.append(self._look())
        usage = self._rollouts.stop()
        self._ground.redis.flushdb()
        return self._row(looks, (usage.rss_bytes - idle_bytes) / self._count)

    def _config(self) -> RunConfig:
        lake = CustomEnv(env_type="frozen_lake", max_steps=12, max_tokens_per_step=4, execution="inline")
        return self._ground.run_config(
            f"bench-{next(_NUMBERS)}-{self._count}",
            custom_envs={TAG: lake},
            train_env_manager=manager(self._count // GROUP_SIZE, GROUP_SIZE),
            rollout=RolloutConfig(max_env_num_per_worker=self._count, coalesce_s=self._options.coalesce_s),
            max_staleness=1e6,
            max_steps=ENDLESS,
        )

    def _publish(self, config: RunConfig) -> None:
        """Version 0, as far as admission is concerned."""
        keys = RunKeys(config.exp_name)
        self._ground.redis.hset(keys.progress, mapping={"version": 0, "step": 0})
        self._ground.redis.xadd(keys.doorbell, {"e": "publish"})

    def _take_until(self, done: Any) -> None:
        while not done():
            self._rollouts.check()
            group = self._buffer.take(0.1)
            if group is not None:
                self._buffer.ack([group.entry_id], 1)
                self._taken += len(group.trajectories)

    def _look(self) -> Look:
        usage = self._rollouts.usage()
        redis_cpu_s = sum(self._redis.cpu_times()[:2])
        return Look(time.monotonic(), self._taken, usage.cpu_s, redis_cpu_s)

    def _row(self, looks: Sequence[Look], bytes_per_episode: float) -> dict[str, Any]:
        pairs = list(itertools.pairwise(looks))
        done = [after.trajectories - before.trajectories for before, after in pairs]

        def per_trajectory(name: str) -> list[float]:
            spent = [getattr(after, name) - getattr(before, name) for before, after in pairs]
            return [1000 * s / max(n, 1) for s, n in zip(spent, done, strict=True)]

        worker, redis = per_trajectory("worker_cpu_s"), per_trajectory("redis_cpu_s")
        rates = [n / (after.at - before.at) for n, (before, after) in zip(done, pairs, strict=True)]
        return {
            "concurrency": self._count,
            "trajectories_per_s": Spread.of(rates),
            "cpu_ms": Spread.of(map(sum, zip(worker, redis, strict=True))),
            "worker_cpu_ms": Spread.of(worker),
            "redis_cpu_ms": Spread.of(redis),
            "kib_per_episode": bytes_per_episode / 1024,
        }


def _show(rows: Sequence[dict[str, Any]], spread: float) -> None:
    show(
        f"One env worker; cost per trajectory within {spread:.0%}",
        ("episodes at a time", "trajectories/s", "CPU ms/trajectory", "of that worker", "Redis", "KiB/episode"),
        [
            [
                r["concurrency"],
                r["trajectories_per_s"].median,
                r["cpu_ms"].median,
                r["worker_cpu_ms"].median,
                r["redis_cpu_ms"].median,
                r["kib_per_episode"],
            ]
            for r in rows
        ],
    )
