"""`offbeat bench redundancy`: time to collect a batch without its slowest episodes; policy and training are emulated.

Invariant: every setting collects `num_groups` groups of `group_size`, in one call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.status import Status

from offbeat.benchmarks.harness.environment import (
    TAG,
    BenchEnvironment,
    bench_environment,
    manager,
    slow_lake,
    worker,
)
from offbeat.benchmarks.harness.learner import BenchLearner, TimedTrainer
from offbeat.benchmarks.harness.result import Spread, console, show
from offbeat.benchmarks.harness.rollout_process import PolicySpec, RolloutProcess, Usage
from offbeat.deploy.config.run import RunConfig
from offbeat.services.telemetry import MetricRecord, RedisMetrics

WARM_UP_BATCHES = 1
ROLL_MEAN_S = 10.0
"""Mean latency in ROLL Flash (arXiv:2510.11345), to which times are scaled."""


@dataclass(frozen=True, slots=True)
class RedundancyOptions:
    """Options; times in seconds."""

    distributions: tuple[str, ...] = ("normal", "lognormal")
    mean_s: float = 0.1
    normal_std_s: float = 0.05
    """Half the mean, as in ROLL Flash."""
    lognormal_std_s: float = 0.5
    num_groups: int = 32
    group_size: int = 8
    over: tuple[tuple[int, int], ...] = ((32, 9), (36, 8), (36, 9), (36, 12))
    """(groups, episodes per group) started."""
    rounds: int = 3
    answer_s: float = 0.005


def run(options: RedundancyOptions) -> dict[str, Any]:
    grid = ((options.num_groups, options.group_size), *options.over)
    with console().status("starting") as status, bench_environment() as base, start_rollouts(base, options) as rollouts:
        results = {
            name: [_row(base, *cell, play(options, base, rollouts, name, *cell, status)) for cell in grid]
            for name in options.distributions
        }
    tables = {name: with_ratios(rows) for name, rows in results.items()}
    for name, rows in tables.items():
        _show(name, options, rows)
    return {"distributions": tables}


def start_rollouts(base: BenchEnvironment, options: RedundancyOptions) -> RolloutProcess:
    first = base.run_config("bench-first", custom_envs={TAG: slow_lake({})})
    base.prepare(first)
    policy = PolicySpec("engine", delay_s=options.answer_s)
    return RolloutProcess(policy, first.output_dir / "policy", sequence_length=first.sequence_length)


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    base: Spread = rows[0]["batch_s"]
    return [{**row, "ratio": base.median / row["batch_s"].median} for row in rows]


@dataclass(frozen=True, slots=True)
class PlayedCell:
    config: RunConfig
    records: Sequence[MetricRecord]
    usage: Usage


def _row(base: BenchEnvironment, groups: int, members: int, played: PlayedCell) -> dict[str, Any]:
    records, name = played.records, played.config.exp_name
    return {
        "groups": groups,
        "members": members,
        "batch_s": Spread.of(batch_times(records)),
        "cancelled": _total(base, name, "cancelled") / len(records),
        "episodes": _total(base, name, "episodes") / len(records),
        "worker_cpu_s": played.usage.cpu_s / len(records),
    }


def play(
    o: RedundancyOptions,
    base: BenchEnvironment,
    rollouts: RolloutProcess,
    distribution: str,
    groups: int,
    members: int,
    status: Status,
    **changes: Any,
) -> PlayedCell:
    """Collect the batches of a setting. changes: to top-level keys of the run."""
    std_s = o.normal_std_s if distribution == "normal" else o.lognormal_std_s
    latency = {"distribution": distribution, "mean_s": o.mean_s, "std_s": std_s}
    name = f"bench-{distribution}-{groups}x{members}"
    config = base.run_config(
        name,
        custom_envs={TAG: slow_lake(latency)},
        train_env_manager=manager(groups, o.group_size, redundancy=members - o.group_size),
        rollout=worker(groups * members, spare_threads=groups * members),
        rollout_batch_size=o.num_groups * o.group_size,
        max_steps=o.rounds + WARM_UP_BATCHES,
        # As many groups as are started beyond the batch: those that lose are too old for the next one, and dropped.
        max_staleness=groups / o.num_groups - 1,
        **changes,
    )
    epoch = base.prepare(config, spare_steps=1.0)

    def echo(step: int) -> None:
        status.update(f"{distribution}: {groups} x {members}, batch {step}/{config.max_steps}")

    learner = BenchLearner(base, config, epoch, TimedTrainer(0.0), echo, check=rollouts.check)
    rollouts.start_run(base.worker_settings(config))
    records = learner.run()
    return PlayedCell(config, records, rollouts.stop())


def batch_times(records: Sequence[MetricRecord]) -> list[float]:
    return [record.values["time/wait_s"].value for record in records[WARM_UP_BATCHES:]]


def _total(base: BenchEnvironment, run_id: str, name: str) -> float:
    records = RedisMetrics(base.redis, run_id).read(count=100_000)
    return sum(r.values[name].total for _, r in records if r.source == "rollout" and name in r.values)


def _show(distribution: str, o: RedundancyOptions, rows: Sequence[dict[str, Any]]) -> None:
    scale = ROLL_MEAN_S / o.mean_s if o.mean_s else 1.0
    columns = ("groups x episodes", "batch, s", "lowest", "highest", "at a mean of 10 s", "ratio", "cancelled a batch")
    show(
        f"{distribution} latency: a batch of {o.num_groups} groups of {o.group_size}",
        columns,
        [
            [f"{r['groups']} x {r['members']}", s.median, s.low, s.high, s.median * scale, r["ratio"], r["cancelled"]]
            for r in rows
            for s in (r["batch_s"],)
        ],
    )
