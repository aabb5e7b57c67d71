"""Plan of a run: the configured rates, the effect of single changes, and the best setting for a machine."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.plan.changes import SettingChange, single_changes, with_groups
from offbeat.deploy.plan.estimate import Effort, Estimate, estimate
from offbeat.deploy.plan.limits import limits_of
from offbeat.deploy.plan.machine import Division, Machine, PartSizes, divisions
from offbeat.deploy.plan.measurements import Measured, PlanError
from offbeat.deploy.plan.memory import Memory, memory_of
from offbeat.deploy.plan.outcome import Setup
from offbeat.deploy.plan.sleep import all_sleep, planned_notes
from offbeat.deploy.plan.workload import Measures
from offbeat.trainer.run import buffer_limits

GROUP_FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Groups in flight to try, in batches."""
BOUNDS = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0)
ENOUGH = 0.95
"""Share of the best rate at which less staleness and fewer groups are preferred."""
MAX_GROUPS = 1 << 40


@dataclass(frozen=True, slots=True)
class Tried:
    """A change and its rate."""

    text: str
    trajectories_per_s: float
    gain: float
    """Relative to the configured rate."""
    lag: float
    learner_idle: float
    is_setting: bool


@dataclass(frozen=True, slots=True)
class Setting:
    num_workers: int
    slots: int
    num_env_groups: int
    num_replicas: int
    learner_processes: int
    critic_processes: int
    """Of its own."""
    max_staleness: float
    gpus: int
    cpus: float
    estimate: Estimate
    memory: Memory
    cost_per_1000: float | None
    """In the currency of `price_per_hour`."""


@dataclass(frozen=True, slots=True)
class Plan:
    configured: Setting
    recommended: Setting
    changes: tuple[Tried, ...]
    """Greatest gain first."""
    by_staleness: tuple[Tried, ...]
    """Configured setting under other bounds."""
    measured: Measured | None
    notes: tuple[str, ...]

    def as_tree(self) -> dict[str, Any]:
        tree = asdict(self)
        if tree["measured"] is not None:  # its episodes are the run's own data
            del tree["measured"]["measures"]["workload"]
        return tree


def setup_of(config: RunConfig) -> Setup:
    """Raises `PlanError` for a pipeline that plays nothing."""
    if config.reads_data:
        raise PlanError(f"pipeline {config.pipeline!r} reads rows; a plan is of episodes (agentic, online_dpo)")
    rollout, infer = config.rollout, config.actor_infer
    limits = replace(buffer_limits(config), total_groups=MAX_GROUPS)
    return Setup(
        limits=replace(limits, group_size=limits.group_size + limits.baselines),
        order=config.buffer.order,
        slots=rollout.num_workers * per_worker_of(config),
        num_workers=rollout.num_workers,
        num_replicas=infer.num_replicas,
        heartbeat_s=min(0.5, config.buffer.worker_timeout_s / 5),
        within=limits_of(config),
        partition=config.train_env_manager.num_groups_partition,
        devices_per_engine=None if infer.device_mapping is None else infer.engine.world_size,
        publish_every=tuple(
            each for each in (config.model_update_frequency, config.save_steps, config.eval_steps) if each
        ),
        max_refills=round(config.max_refill_ratio * limits.groups_per_step) if config.zero_variance == "refill" else 0,
        sleeps=all_sleep(config),
    )


def per_worker_of(config: RunConfig) -> int:
    own = config.train_env_manager.max_env_num_per_worker
    return min(config.rollout.max_env_num_per_worker, own or config.rollout.max_env_num_per_worker)


def make_plan(
    config: RunConfig,
    measures: Measures,
    *,
    machine: Machine | None = None,
    measured: Measured | None = None,
    architecture: Mapping[str, Any] | None = None,
    price_per_hour: float | None = None,
    episodes: int = 6_000,
    echo: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Simulate; raises `PlanError`. price_per_hour: of the whole machine. episodes: of each setting and seed."""
    machine = machine or Machine()
    setup, sizes = setup_of(config), PartSizes.of(config, machine)
    effort = Effort.for_batch(setup.batch, episodes)
    ways = list(divisions(machine, sizes, setup, measures))
    if not ways:
        raise PlanError("this machine has no room for an engine, a worker and a learner: see --gpus and --cpus")

    def setting(division: Division) -> Setting:
        at = estimate(division.setup, division.measures, effort)
        used = division.setup
        cost = price_per_hour / 3.6 / at.trajectories_per_s if price_per_hour is not None else None
        return Setting(
            num_workers=used.num_workers,
            slots=used.slots,
            num_env_groups=used.limits.max_groups_in_flight,
            num_replicas=used.num_replicas,
            learner_processes=division.learner_processes,
            critic_processes=sizes.critic_processes,
            max_staleness=used.limits.max_staleness,
            gpus=sizes.gpus(used, division.learner_processes),
            cpus=sizes.cpus(used, division.learner_processes),
            estimate=at,
            memory=memory_of(at, used, measures, config.save_steps, architecture),
            cost_per_1000=cost,
        )

    echo("as configured")
    configured = setting(Division(setup, measures, sizes.learner_processes))
    changes = try_changes(single_changes(setup, measures, per_worker_of(config)), configured.estimate, effort, echo)
    by_staleness = try_changes(_bounds(setup, measures), configured.estimate, effort, echo)
    quick = replace(Effort.for_batch(setup.batch, episodes // 3), seeds=1)
    per_worker = per_worker_of(config)
    choices = [
        replace(way, setup=wide)
        for way in ways
        for wide in _with_more_groups(way, per_worker, sizes.workers_within(machine, way.setup, way.learner_processes))
    ]
    if sizes.fit(machine, setup, sizes.learner_processes):
        choices.append(Division(setup, measures, sizes.learner_processes))
    division = _recommend(choices, quick, echo)
    return Plan(
        configured=configured,
        recommended=setting(division),
        changes=tuple(sorted(changes, key=lambda tried: -tried.trajectories_per_s)),
        by_staleness=tuple(by_staleness),
        measured=measured,
        notes=(*planned_notes(config), *(measured.notes if measured else ())),
    )


def bounds_of(setup: Setup) -> list[float]:
    """Return the bounds to try, the least that validation accepts first."""
    least = setup.least_staleness
    return [least, *(bound for bound in BOUNDS if bound > least)]


def _bounds(setup: Setup, measures: Measures) -> Iterator[SettingChange]:
    for bound in bounds_of(setup):
        limits = replace(setup.limits, max_staleness=bound)
        yield SettingChange(f"{bound:g}", replace(setup, limits=limits), measures)


def try_changes(
    changes: Iterable[SettingChange], configured: Estimate, effort: Effort, echo: Callable[[str], None] = lambda _: None
) -> list[Tried]:
    results: list[Tried] = []
    for change in changes:
        echo(change.text)
        at = estimate(change.setup, change.measures, effort)
        gain = at.trajectories_per_s / configured.trajectories_per_s
        results.append(Tried(change.text, at.trajectories_per_s, gain, at.lag, at.learner_idle, change.is_setting))
    return results


def _with_more_groups(way: Division, per_worker: int, most_workers: float) -> Iterator[Setup]:
    """Yield a division's setup with `GROUP_FACTORS`, or else with the groups that its workers hold."""
    limits = way.setup.limits
    most = max(most_workers * per_worker / (limits.group_size + limits.redundancy), 1)
    counts = [max(round(limits.groups_per_step * factor), 1) for factor in GROUP_FACTORS]
    for groups in [count for count in counts if count <= most] or [int(most)]:
        setup = with_groups(way.setup, way.measures, groups, per_worker).setup
        workers = int(min(setup.num_workers, most_workers))
        yield replace(setup, num_workers=workers, slots=workers * per_worker)


def _recommend(choices: Iterable[Division], effort: Effort, echo: Callable[[str], None]) -> Division:
    """Return the fewest engines and groups, then the least staleness, of nearly the best rate."""
    rated: list[tuple[float, Division]] = []
    for division in choices:
        limits = replace(division.setup.limits, max_staleness=bounds_of(division.setup)[-1])
        echo(f"{division.setup.num_replicas} engines, {limits.max_groups_in_flight} groups in play")
        wide = replace(division.setup, limits=limits)
        rate = estimate(wide, division.measures, effort).trajectories_per_s
        rated.append((rate, replace(division, setup=wide)))
    best = max(rate for rate, _ in rated)
    enough = [division for rate, division in rated if rate >= ENOUGH * best]
    chosen = min(enough, key=lambda each: (each.setup.num_replicas, each.setup.limits.max_groups_in_flight))
    return replace(chosen, setup=_with_least_staleness(chosen, ENOUGH * best, effort))


def _with_least_staleness(division: Division, rate: float, effort: Effort) -> Setup:
    """Return the setting under the least bound with `rate`."""
    for bound in bounds_of(division.setup)[:-1]:
        setup = replace(division.setup, limits=replace(division.setup.limits, max_staleness=bound))
        if estimate(setup, division.measures, effort).trajectories_per_s >= rate:
            return setup
    return division.setup
