"""Tables of a plan."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from offbeat.deploy.plan.measurements import Measured
from offbeat.deploy.plan.plan import Plan, Setting, Tried

CLEAR_GAIN = 0.02
"""Beyond the simulation's noise."""


@dataclass(frozen=True, slots=True)
class PlanTable:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def show_plan(plan: Plan, console: Console) -> None:
    for table in tables_of(plan)[:2]:
        shown = Table(*table.head, box=None, pad_edge=False, header_style="bold")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
        console.print()
    console.print(name_best_change(plan.changes), soft_wrap=True)
    for note in plan.notes:
        console.print(f"note: {note}", soft_wrap=True)


def tables_of(plan: Plan) -> tuple[PlanTable, ...]:
    """Return the settings beside each other, single changes, and bounds of staleness."""
    columns = {"as configured": _cells(plan.configured), "recommended": _cells(plan.recommended)}
    if plan.measured is not None:
        columns["measured"] = _observed(plan.measured)
    names = _cells(plan.configured)
    settings = tuple((name, *(cells.get(name, "") for cells in columns.values())) for name in names)
    return (
        PlanTable(("", *columns), settings),
        _tried("single change", plan.changes),
        _tried("max_staleness", plan.by_staleness),
    )


def _tried(name: str, changes: Iterable[Tried]) -> PlanTable:
    rows = tuple(
        (
            each.text,
            _number(each.trajectories_per_s),
            f"{each.gain - 1:+.0%}",
            f"{each.lag:.2g}",
            f"{each.learner_idle:.0%}",
        )
        for each in changes
    )
    return PlanTable((name, "trajectories/s", "gain", "lag", "learner idle"), rows)


def name_best_change(changes: Iterable[Tried]) -> str:
    best = max((tried for tried in changes if tried.is_setting), key=lambda tried: tried.gain, default=None)
    if best is None or best.gain < 1 + CLEAR_GAIN:
        return "No single change of the configuration makes it clearly faster."
    return f"{best.text} would help most: {best.gain - 1:+.0%} trajectories/s, mean lag {best.lag:.2g}."


def _cells(setting: Setting) -> Mapping[str, str]:
    at, memory = setting.estimate, setting.memory
    lags = ", ".join(f"{lag}: {share:.0%}" for lag, share in at.lags.items())
    dropped = ", ".join(f"{share:.1%} {reason}" for reason, share in at.dropped.items()) or "none"
    kv = f"{memory.kv_tokens:,.0f} tokens" + (f", {memory.kv_gib:.2g} GiB" if memory.kv_gib is not None else "")
    cells = {
        "env workers": str(setting.num_workers),
        "episode slots": str(setting.slots),
        "groups in play": str(setting.num_env_groups),
        "engines": str(setting.num_replicas),
        "learner processes": str(setting.learner_processes),
        **({"critic processes": str(setting.critic_processes)} if setting.critic_processes else {}),
        "max_staleness": f"{setting.max_staleness:g}",
        "GPUs, CPUs": f"{setting.gpus}, {setting.cpus:g}",
        "trajectories/s": f"{_number(at.trajectories_per_s)} ± {_number(at.spread)}",
        "step, s": _number(at.step_s),
        "  ideal: max of the next two": _number(at.closed.ideal_step_s),
        "  training alone": _number(at.closed.train_s),
        "  batch x episode / slots": _number(at.closed.slots_step_s),
        "  rollouts alone, in groups": _number(at.closed.rollout_step_s),
        "  synchronous": _number(at.closed.sync_step_s),
        "mean lag": f"{at.lag:.2f}",
        "  by Little's law": f"{at.expected_lag:.2f}",
        "lags": lags,
        "learner idle": f"{at.learner_idle:.0%}",
        "slots empty": f"{at.slots_empty:.0%}",
        **({"busiest env worker's CPU": f"{at.worker_busy:.0%}"} if at.worker_busy else {}),
        "dropped groups": dropped,
        "Redis": f"{memory.redis_mib:,.0f} MiB",
        "KV cache of an engine": kv,
    }
    if setting.cost_per_1000 is not None:
        cells["cost of 1,000 trajectories"] = f"{setting.cost_per_1000:.3g}"
    return cells


def _observed(measured: Measured) -> Mapping[str, str]:
    return {
        "trajectories/s": _number(measured.trajectories_per_s),
        "step, s": _number(measured.step_s),
        "mean lag": f"{measured.lag:.2f}",
        "learner idle": f"{measured.learner_idle:.0%}",
        "dropped groups": f"{measured.dropped} in all",
    }


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
