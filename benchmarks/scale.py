"""`offbeat bench scale`: cost of an episode at 16 to 4,096 concurrent ones in an env worker, with a scripted policy.

CPU time: the worker's process and Redis, without the consumer.

Rounds alternate over concurrencies, to cancel drift of the machine's speed.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any

import psutil

from offbeat.benchmarks.harness.environment import (
    TAG,
    BenchEnvironment,
    bench_environment,
    manager,
    slow_lake,
)
from offbeat.benchmarks.harness.result import Spread, console, show
from offbeat.benchmarks.harness.rollout_process import PolicySpec, RolloutProcess
from offbeat.deploy.config.run import RunConfig
from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.keys import RunKeys
from offbeat.services.rollout.config import CustomEnv, RolloutConfig

GROUP_SIZE = 8
WARM_UP = 64
WARM_UP_EPISODES = 3
"""Unmeasured episodes per slot."""
UNREACHED_STEPS = 10**6
MAX_COST_SPREAD = 0.2

_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class ScaleOptions:
    """Options; times in seconds."""

    concurrency: tuple[int, ...] = (16, 64, 256, 1024, 4096)
    answer_s: float = 0.0
    """Policy delay per turn."""
    coalesce_s: float = 0.0
    window_s: float = 8.0
    """Minimum; see `generations`."""
    generations: int = 8
    """Mean episodes per slot and window."""
    rounds: int = 5


@dataclass(frozen=True, slots=True)
class Totals:
    at: float
    trajectories: int
    worker_cpu_s: float
    redis_cpu_s: float


@dataclass(frozen=True, slots=True)
class Window:
    trajectories_per_s: float
    worker_cpu_ms: float
    """Per trajectory."""
    redis_cpu_ms: float
    """Per trajectory."""
    bytes_per_episode: float
    """Growth of the process; too low after a window that left free memory."""

    @property
    def cpu_ms(self) -> float:
        """Per trajectory."""
        return self.worker_cpu_ms + self.redis_cpu_ms


def run(options: ScaleOptions) -> dict[str, Any]:
    with console().status("starting") as status, bench_environment() as base:
        first = base.run_config("bench-first", custom_envs={TAG: slow_lake({})})
        base.prepare(first)
        policy = PolicySpec("client", delay_s=options.answer_s)
        windows: dict[int, list[Window]] = {count: [] for count in options.concurrency}
        with RolloutProcess(policy, first.output_dir / "policy", sequence_length=first.sequence_length) as rollouts:
            _ConcurrencyRun(options, base, rollouts, WARM_UP).measure()  # imports, caches, connections
            for number in range(options.rounds):
                for count in options.concurrency:
                    status.update(f"round {number + 1} of {options.rounds}: {count} episodes at a time")
                    windows[count].append(_ConcurrencyRun(options, base, rollouts, count).measure())
    rows = [_row(count, measured) for count, measured in windows.items()]
    spread = cost_spread([[window.cpu_ms for window in measured] for measured in windows.values()])
    _show(rows, spread)
    return {"settings": rows, "cost_spread": spread, "flat": spread <= MAX_COST_SPREAD}


def cost_spread(costs: Sequence[Sequence[float]]) -> float:
    """Return the relative excess of the most expensive setting over the cheapest.

    costs: windows per setting, by round; compared within a round, median over rounds.
    """
    means = [geometric_mean(of_round) for of_round in zip(*costs, strict=True)]
    relative = [median(cost / mean for cost, mean in zip(windows, means, strict=True)) for windows in costs]
    return max(relative) / min(relative) - 1


class _ConcurrencyRun:
    def __init__(self, options: ScaleOptions, base: BenchEnvironment, rollouts: RolloutProcess, count: int) -> None:
        self._options = options
        self._bench_env = base
        self._rollouts = rollouts
        self._count = count
        self._redis = psutil.Process(base.server_pid)
        self._num_taken = 0

    def measure(self) -> Window:
        config = self._config()
        epoch = self._bench_env.prepare(config)
        self._publish(config)
        self._buffer = RedisLearnerBuffer(self._bench_env.redis, config.exp_name, epoch)
        idle_bytes = psutil.Process(self._rollouts.pid).memory_info().rss
        self._rollouts.start_run(self._bench_env.worker_settings(config))
        self._take_until(lambda: self._num_taken >= WARM_UP_EPISODES * self._count)
        before = self._measure_totals()
        end, count = before.at + self._options.window_s, self._num_taken + self._options.generations * self._count
        self._take_until(lambda: time.monotonic() >= end and self._num_taken >= count)
        after = self._measure_totals()
        grown = self._rollouts.stop().rss_bytes - idle_bytes
        self._bench_env.redis.flushdb()
        done = after.trajectories - before.trajectories
        return Window(
            trajectories_per_s=done / (after.at - before.at),
            worker_cpu_ms=1000 * (after.worker_cpu_s - before.worker_cpu_s) / done,
            redis_cpu_ms=1000 * (after.redis_cpu_s - before.redis_cpu_s) / done,
            bytes_per_episode=grown / self._count,
        )

    def _config(self) -> RunConfig:
        lake = CustomEnv(env_type="frozen_lake", max_steps=12, max_tokens_per_step=4, execution="inline")
        return self._bench_env.run_config(
            f"bench-{next(_NUMBERS)}-{self._count}",
            custom_envs={TAG: lake},
            train_env_manager=manager(-(-self._count // GROUP_SIZE), GROUP_SIZE),
            rollout=RolloutConfig(max_env_num_per_worker=self._count, coalesce_s=self._options.coalesce_s),
            max_staleness=1e6,
            max_steps=UNREACHED_STEPS,
        )

    def _publish(self, config: RunConfig) -> None:
        keys = RunKeys(config.exp_name)
        self._bench_env.redis.hset(keys.progress, mapping={"version": 0, "step": 0})
        self._bench_env.redis.xadd(keys.doorbell, {"e": "publish"})

    def _take_until(self, done: Any) -> None:
        while not done():
            self._rollouts.check()
            group = self._buffer.take(0.1)
            if group is not None:
                self._buffer.ack([group.entry_id], 1)
                self._num_taken += len(group.trajectories)

    def _measure_totals(self) -> Totals:
        usage = self._rollouts.usage()
        redis_cpu_s = sum(self._redis.cpu_times()[:2])
        return Totals(time.monotonic(), self._num_taken, usage.cpu_s, redis_cpu_s)


def _row(count: int, windows: Sequence[Window]) -> dict[str, Any]:
    return {
        "concurrency": count,
        "trajectories_per_s": Spread.of(window.trajectories_per_s for window in windows),
        "cpu_ms": Spread.of(window.cpu_ms for window in windows),
        "worker_cpu_ms": Spread.of(window.worker_cpu_ms for window in windows),
        "redis_cpu_ms": Spread.of(window.redis_cpu_ms for window in windows),
        "kib_per_episode": max(window.bytes_per_episode for window in windows) / 1024,
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
