"""Command line of `offbeat chaos`."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.benchmarks.chaos.options import (
    JsonFile,
    Overrides,
    RunFolder,
    write_report,
)
from offbeat.deploy.local.signals import raise_interrupt_on_signals

if TYPE_CHECKING:
    from offbeat.benchmarks.chaos.report import ChaosReport


def chaos(
    minutes: Annotated[float, typer.Option(min=0.1, metavar="M", help="No fault starts later.")] = 3.0,
    kills: Annotated[int, typer.Option(min=1, metavar="N", help="Faults.")] = 20,
    seed: Annotated[int, typer.Option(metavar="S", help="Of the order of faults, and of the run.")] = 1,
    steps: Annotated[int | None, typer.Option(min=4, help="Steps of the run.", show_default="6 for each fault")] = None,
    overlap: Annotated[
        float, typer.Option(min=0, max=1, metavar="P", help="Share of the faults after which the next comes at once.")
    ] = 0.0,
    patience: Annotated[
        float, typer.Option(min=1, metavar="S", help="A run that stands still for longer after a fault fails; seconds.")
    ] = 240.0,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Faults whose name contains this.")] = "",
    out: RunFolder = None,
    as_json: JsonFile = None,
    overrides: Overrides = None,
) -> None:
    """Train under random kills and stops, then prove that nothing was lost.

    Exit codes: 0 the run finished, the audit proves it, nothing is left over; 1 otherwise.
    """
    from offbeat.benchmarks.chaos.faults import plan
    from offbeat.benchmarks.chaos.session import run_chaos

    raise_interrupt_on_signals()
    folder = out or Path(tempfile.mkdtemp(prefix="offbeat-chaos-")) / "run"
    try:
        faults = plan(kills, seed, only)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--only") from None
    report = run_chaos(
        folder,
        faults,
        minutes=minutes,
        seed=seed,
        steps=steps or 6 * kills,
        overlap=overlap,
        patience_s=patience,
        echo=typer.echo,
        overrides=overrides or [],
    )
    write_report(as_json, report.as_tree())
    _show(report, folder)
    raise typer.Exit(0 if report.passed else 1)


def _show(report: "ChaosReport", folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("fault", "times", "process back, s", "two steps later, s", box=None)
    for name, row in report.by_kind().items():
        back, steps = row["back_s"], row["two_steps_s"]
        table.add_row(
            name, str(row["count"]), *(f"{x['median']:g} (max {x['max']:g})" if x else "-" for x in (back, steps))
        )
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    audit = report.audit
    if audit:
        console.print(
            f"{len(report.done)} faults, {report.steps} steps in {report.wall_s:g} s by {audit['learners']} learners; "
            f"groups: {audit['admitted']} admitted = {audit['trained']} trained + {sum(audit['dropped'].values())} dropped "
            f"{audit['dropped'] or ''} + {sum(audit['failed'].values())} failed {audit['failed'] or ''} + "
            f"{audit['in_flight']} in flight; lag {audit['staleness']}"
        )
        for finding in audit["findings"]:
            console.print(f"  - {finding}")
    for line in (*report.notes, *report.complaints, *(f"left behind: {leftover}" for leftover in report.leftovers)):
        console.print(f"  - {line}")
    console.print(f"{'PASSED' if report.passed else 'FAILED'}: {folder}")
