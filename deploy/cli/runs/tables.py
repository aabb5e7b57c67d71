"""Tables of runs."""

import time
from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from offbeat.deploy.cli.run_view import MARKS
from offbeat.services.control.schemas import RunsView, RunView
from offbeat.services.telemetry import format_rate

METRICS = {"success": ".2f", "loss": ".4f", "rewards/accuracies": ".2f", "rewards/margins": ".3f"}
OF_ROWS = {"loss": "loss", "rewards/accuracies": "accuracy", "rewards/margins": "margin"}
"""Data pipelines' metrics and labels."""


def runs_table(listing: RunsView) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    has_loss = any(view.metrics.get("loss") is not None for view in listing.runs)
    result = ("success", "loss") if has_loss else ("success",)
    for heading in ("run", "state", "step", *result, "trajectories/s", "since"):
        table.add_column(heading, no_wrap=True)
    for view in listing.runs:
        rate = view.rates.trajectories if view.rates else 0.0
        table.add_row(
            escape(view.id),
            view.state.value,
            f"{max(view.step, 0)}/{view.max_steps}",
            *(_metric(view, name) for name in result),
            f"{rate:.1f}" if rate else "",
            _ago(view.created_at),
        )
    return table


def _metric(view: RunView, name: str) -> str:
    value = view.metrics.get(name)
    return "" if value is None else f"{value:{METRICS[name]}}"


def run_table(view: RunView) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(view):
        table.add_row(name, value)
    return table


def _rows(view: RunView) -> Iterator[tuple[str, str]]:
    yield "run", escape(view.id)
    phase = f" ({escape(view.phase)})" if view.phase and not view.state.is_terminal else ""
    yield "state", view.state.value + phase
    if view.error:
        yield "error", escape(view.error) + (f" (see {escape(view.log)})" if view.log else "")
    yield "step", f"{max(view.step, 0)} of {view.max_steps}, version {view.version}, attempt {view.attempt}"
    if shown := [f"{label} {_metric(view, name)}" for name, label in OF_ROWS.items() if _metric(view, name)]:
        yield "newest step", ", ".join(shown)
    if view.staleness and view.staleness.mean is not None:
        maximum = f", at most {view.staleness.max:.0f}" if view.staleness.max is not None else ""
        yield "staleness", f"{view.staleness.mean:.2f} on average{maximum} (bound {view.staleness.bound:g})"
    if view.rates and any(view.rates.model_dump().values()):
        rates = view.rates
        tokens = (
            f"{format_rate(rates.tokens_generated)} tokens/s generated, {format_rate(rates.tokens_trained)} trained"
        )
        yield "rates", f"{rates.trajectories:.1f} trajectories/s, {tokens}"
    yield from _ledger(view)
    for name, part in view.components.items():
        restarts = f", restarted {part.restarts}x" if part.restarts else ""
        detail = f" ({escape(part.detail)})" if part.detail else ""
        yield name, f"{MARKS[part.health]}{detail}{restarts}"
    yield "settings", ", ".join(f"{name} {value:g}" for name, value in view.settings.model_dump().items())
    for change in view.changes:
        values = ", ".join(f"{name} {value:g}" for name, value in change.values.items())
        taken = f"from step {change.from_step} on" if change.from_step is not None else "not adopted yet"
        yield (
            "changed",
            f"{values} ({_ago(change.at)} ago, {taken})" + (f": {escape(change.why)}" if change.why else ""),
        )
    for name, place in view.paths.model_dump().items():
        yield name, escape(place)


def _ledger(view: RunView) -> Iterator[tuple[str, str]]:
    if view.counters is None:
        return
    counters = view.counters
    lost = {
        **{f"dropped {k}": n for k, n in counters.dropped.items()},
        **{f"failed {k}": n for k, n in counters.failed.items()},
    }
    more = "".join(f", {number} {escape(name)}" for name, number in lost.items())
    yield "groups", f"{counters.admitted} admitted, {counters.trained} trained, {counters.in_flight} in flight{more}"


def _ago(at: float) -> str:
    seconds = max(time.time() - at, 0.0)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
