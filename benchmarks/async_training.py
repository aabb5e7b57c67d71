"""`offbeat bench async`: synchronous against asynchronous training, without Ray.

Invariant: a distribution's settings are measured in one call.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from rich.status import Status

from offbeat.benchmarks.harness.environment import (
    TAG,
    BenchEnvironment,
    bench_environment,
    manager,
    slow_lake,
    worker,
)
from offbeat.benchmarks.harness.learner import BenchLearner, TimedTrainer, real_trainers
from offbeat.benchmarks.harness.result import console, show
from offbeat.benchmarks.harness.rollout_process import PolicySpec, RolloutProcess, Usage
from offbeat.deploy.config.run import RunConfig
from offbeat.services.buffer.scripts import BufferKeys
from offbeat.services.telemetry import MetricRecord

UNBOUNDED = 1e6
"""Staleness bound without effect."""
WARM_UP_STEPS = 1


@dataclass(frozen=True, slots=True)
class AsyncOptions:
    """Options; times in seconds."""

    work: Literal["real", "emulated"] = "real"
    distributions: tuple[str, ...] = ("normal", "lognormal")
    mean_s: float = 0.2
    std_s: float = 0.2
    staleness: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    steps: int = 10
    batch: int = 64
    group_size: int = 8
    env_groups: int = 16
    train_s: float = 0.5
    """Per batch; emulated only."""
    answer_s: float = 0.02
    """Per turn; emulated only."""


@dataclass(frozen=True, slots=True)
class ProgressPoint:
    trajectories: int
    seconds: float
    reward: float


@dataclass(frozen=True, slots=True)
class RunResult:
    distribution: str
    max_staleness: float
    trajectories_per_s: float
    step_s: float
    learner_idle: float
    """Share of time without trajectories."""
    rollout_idle: float
    """Mean share of empty slots."""
    staleness: float
    staleness_max: float
    dropped: int
    curve: tuple[ProgressPoint, ...]
    ratio: float = 1.0
    """Throughput relative to the synchronous run."""
    share_of_ideal: float = 0.0


@dataclass(frozen=True, slots=True)
class PlayedSetting:
    result: RunResult
    config: RunConfig
    records: Sequence[MetricRecord]


@dataclass(frozen=True, slots=True)
class UnboundedRates:
    """Of each side alone."""

    rollout: float
    training: float

    @property
    def ideal(self) -> float:
        return min(self.rollout, self.training)


class AsyncBench:
    def __init__(
        self,
        options: AsyncOptions,
        base: BenchEnvironment,
        rollouts: RolloutProcess,
        trainers: Callable[[RunConfig], Any],
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        """changes: to top-level keys of the runs."""
        self._options = options
        self._changes = changes or {}
        self._bench_env = base
        self._rollouts = rollouts
        self._trainers = trainers
        self._slots = options.env_groups * options.group_size

    def alone(self, distribution: str, echo: Callable[[str], None]) -> UnboundedRates:
        """Measure rollouts, then training on their trajectories."""
        config = self._config(f"alone-{distribution}", distribution, UNBOUNDED)
        learner = self._learner(config, lambda step: echo(f"{distribution}: training alone, step {step}"), 1e3)
        with closing(learner):
            learner.publish_start()
            self._rollouts.start_run(self._bench_env.worker_settings(config))
            echo(f"{distribution}: rollouts alone")
            rollout = self._watch_rollouts(config)
            self._rollouts.stop()
            records = learner.run()
        return UnboundedRates(rollout, self._options.batch * (len(records) - WARM_UP_STEPS) / _busy_s(records))

    def setting(self, distribution: str, max_staleness: float, echo: Callable[[str], None]) -> RunResult:
        return self.play(distribution, max_staleness, echo).result

    def play(self, distribution: str, max_staleness: float, echo: Callable[[str], None]) -> PlayedSetting:
        name = f"{distribution}-{max_staleness:g}"
        config = self._config(name, distribution, max_staleness)
        label = f"{distribution}: max_staleness {max_staleness:g}"
        learner = self._learner(
            config, lambda step: echo(f"{label}, step {step}/{config.max_steps}"), max_staleness + 1
        )
        self._rollouts.start_run(self._bench_env.worker_settings(config))
        records = learner.run()
        return PlayedSetting(
            self._summed_up(distribution, max_staleness, records, self._rollouts.stop()), config, records
        )

    @property
    def environment(self) -> BenchEnvironment:
        return self._bench_env

    def _config(self, name: str, distribution: str, max_staleness: float) -> RunConfig:
        o = self._options
        latency = {"distribution": distribution, "mean_s": o.mean_s, "std_s": o.std_s}
        return self._bench_env.run_config(
            f"bench-{name}",
            custom_envs={TAG: slow_lake(latency)},
            train_env_manager=manager(o.env_groups, o.group_size),
            rollout=worker(self._slots),
            rollout_batch_size=o.batch,
            max_steps=o.steps,
            max_staleness=max_staleness,
            **self._changes,
        )

    def _learner(self, config: RunConfig, on_step: Callable[[int], None], spare_steps: float) -> BenchLearner:
        epoch = self._bench_env.prepare(config, spare_steps=spare_steps)
        return BenchLearner(self._bench_env, config, epoch, self._trainers(config), on_step, check=self._rollouts.check)

    def _watch_rollouts(self, config: RunConfig) -> float:
        """Return trajectories/s after every slot's first use."""
        num_groups = self._options.env_groups + config.max_steps * config.rollout_batch_size // self._options.group_size
        stream = BufferKeys(config.exp_name).stream
        position = "0-0"
        acked_ms: list[int] = []
        while len(acked_ms) < num_groups:
            self._rollouts.check()
            for _, entries in cast(Any, self._bench_env.redis.xread({stream: position}, block=1000)) or []:
                position = entries[-1][0].decode()
                acked_ms += [int(entry_id.partition(b"-")[0]) for entry_id, _ in entries]
        first = self._options.env_groups
        return (
            (num_groups - first) * self._options.group_size / ((acked_ms[num_groups - 1] - acked_ms[first - 1]) / 1000)
        )

    def _summed_up(self, distribution: str, bound: float, records: Sequence[MetricRecord], usage: Usage) -> RunResult:
        measured, batch = records[WARM_UP_STEPS:], self._options.batch
        span_s = records[-1].time - records[WARM_UP_STEPS - 1].time
        total = _sum(measured, "time/step_s")
        began = records[0].time - records[0].values["time/step_s"].value
        curve = [ProgressPoint(batch * r.step, r.time - began, r.values["reward"].value) for r in records if r.step]
        return RunResult(
            distribution=distribution,
            max_staleness=bound,
            trajectories_per_s=batch * len(measured) / span_s,
            step_s=span_s / len(measured),
            learner_idle=_sum(measured, "time/wait_s") / total,
            rollout_idle=1 - usage.playing / self._slots,
            staleness=_sum(measured, "staleness") / len(measured),
            staleness_max=max(r.values["staleness_max"].value for r in records),
            dropped=int(_sum(records, "groups_dropped/stale")),
            curve=tuple(curve),
        )


def _sum(records: Sequence[MetricRecord], name: str) -> float:
    return sum(record.values[name].value for record in records if name in record.values)


def _busy_s(records: Sequence[MetricRecord]) -> float:
    measured = records[WARM_UP_STEPS:]
    return _sum(measured, "time/step_s") - _sum(measured, "time/wait_s")


def run(options: AsyncOptions) -> dict[str, Any]:
    with console().status("starting") as status, open_bench(options, status) as bench:
        results = [_distribution(bench, options, name, status) for name in options.distributions]
    for result in results:
        _show(result)
    return {"distributions": results}


@contextmanager
def open_bench(options: AsyncOptions, status: Status, changes: Mapping[str, Any] | None = None) -> Iterator[AsyncBench]:
    def echo(text: str) -> None:
        status.update(text)

    with bench_environment() as base:
        config = base.run_config("bench-first", custom_envs={TAG: slow_lake({})}).model_copy(
            update={"pretrain": "tiny"}
        )
        base.prepare(config)
        model = config.output_dir / "policy"
        kind = "vllm" if options.work == "real" else "engine"
        policy = PolicySpec(kind, delay_s=options.answer_s, config=config.actor_infer)
        with RolloutProcess(policy, model, sequence_length=config.sequence_length) as rollouts:
            if options.work == "emulated":
                yield AsyncBench(options, base, rollouts, lambda _: TimedTrainer(options.train_s), changes)
                return
            with real_trainers(base, config, echo) as trainers:
                yield AsyncBench(options, base, rollouts, trainers, changes)


def _distribution(bench: AsyncBench, options: AsyncOptions, name: str, status: Status) -> dict[str, Any]:
    def echo(text: str) -> None:
        status.update(text)

    alone = bench.alone(name, echo)
    settings = [bench.setting(name, bound, echo) for bound in (0.0, *options.staleness)]
    return summary(name, alone, settings)


def summary(distribution: str, alone: UnboundedRates, settings: Sequence[RunResult]) -> dict[str, Any]:
    """Return ratios to the first (synchronous) setting, and rewards at equal work and time."""
    sync = settings[0]
    at_trajectories = min(s.curve[-1].trajectories for s in settings)
    at_seconds = min(s.curve[-1].seconds for s in settings)
    rows = [
        {
            **asdict(s),
            "ratio": s.trajectories_per_s / sync.trajectories_per_s,
            "share_of_ideal": s.trajectories_per_s / alone.ideal,
            "reward_at_equal_trajectories": reward_until(s.curve, lambda p: p.trajectories <= at_trajectories),
            "reward_at_equal_time": reward_until(s.curve, lambda p: p.seconds <= at_seconds),
        }
        for s in settings
    ]
    return {
        "distribution": distribution,
        "rollout_alone": alone.rollout,
        "training_alone": alone.training,
        "ideal": alone.ideal,
        "equal_trajectories": at_trajectories,
        "equal_time_s": at_seconds,
        "settings": rows,
    }


LAST_POINTS = 4


def reward_until(curve: Sequence[ProgressPoint], within: Callable[[ProgressPoint], bool]) -> float | None:
    """Return the last steps' mean reward within a limit."""
    last = [point.reward for point in curve if within(point)][-LAST_POINTS:]
    return sum(last) / len(last) if last else None


def _show(result: dict[str, Any]) -> None:
    title = (
        f"{result['distribution']}: rollouts alone {result['rollout_alone']:.1f} trajectories/s, training alone "
        f"{result['training_alone']:.1f}; ideal {result['ideal']:.1f}"
    )
    columns = ("max_staleness", "trajectories/s", "ratio", "of ideal", "learner idle", "slots idle", "lag")
    columns += ("dropped", f"reward at {result['equal_trajectories']}", f"reward at {result['equal_time_s']:.0f} s")
    names = ("max_staleness", "trajectories_per_s", "ratio", "share_of_ideal", "learner_idle", "rollout_idle")
    names += ("staleness", "dropped", "reward_at_equal_trajectories", "reward_at_equal_time")
    show(title, columns, [[row[name] for name in names] for row in result["settings"]])
