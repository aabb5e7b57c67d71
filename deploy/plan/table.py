"""Tables of a plan."""

from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table

from offbeat.deploy.plan.measurements import Measured
from offbeat.deploy.plan.plan import Plan, Setting, Tried

CLEAR_GAIN = 0.02
"""Beyond the simulation's noise."""


def show_plan(plan: Plan, console: Console) -> None:
    table = Table("", "as configured", "recommended", box=None, pad_edge=False, header_style="bold")
    if plan.measured is not None:
        table.add_column("measured")
    observed = _observed(plan.measured) if plan.measured is not None else {}
    recommended = _cells(plan.recommended)
    for name, cell in _cells(plan.configured).items():
        table.add_row(name, cell, recommended[name], *([observed.get(name, "")] if plan.measured is not None else []))
    console.print(table)
    console.print()
    changes = Table(
        "single change", "trajectories/s", "gain", "lag", "learner idle", box=None, pad_edge=False, header_style="bold"
    )
    for tried in plan.changes:
        gain = f"{tried.gain - 1:+.0%}"
        changes.add_row(
            tried.text, _number(tried.trajectories_per_s), gain, f"{tried.lag:.2g}", f"{tried.learner_idle:.0%}"
        )
    console.print(changes)
    console.print()
    console.print(name_best_change(plan.changes), soft_wrap=True)
    for note in plan.notes:
        console.print(f"note: {note}", soft_wrap=True)


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
