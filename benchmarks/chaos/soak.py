"""`offbeat soak`: a long run, checked for memory growth."""

import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offbeat.benchmarks.chaos.options import (
    JsonFile,
    Overrides,
    RunFolder,
    write_report,
)
from offbeat.deploy.local.signals import raise_interrupt_on_signals

if TYPE_CHECKING:
    from offbeat.benchmarks.chaos.memory import Growth, Series

SAMPLE_S = 5.0
START_S = 600.0
END_S = 60.0
INTERRUPTED = 130
LEAK_SHARE = 0.02
"""Failing hourly growth, as a share of memory."""
MIN_GROWTH_MIB = 1.0
"""Less is fragmentation."""
METRICS, EVENTS = 1000, 5000
"""Retention of records and ledger events, reached within the hour."""
SOAK_OVERRIDES = ("max_steps=1000000000", "warm_start.steps=40", "final_val_batch_size=8")


@dataclass
class SoakReport:
    minutes: float
    steps: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    complaints: list[str] = field(default_factory=list[str])
    leftovers: list[str] = field(default_factory=list[str])

    @property
    def passed(self) -> bool:
        return not self.complaints and not self.leftovers

    def as_tree(self) -> dict[str, Any]:
        return {**self.__dict__, "passed": self.passed}


def soak(
    minutes: Annotated[float, typer.Option(min=1.0, metavar="M", help="After the first step.")] = 60.0,
    out: RunFolder = None,
    as_json: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw memory over time there (PNG).", show_default=False)
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Check that no process's memory grows, training at full speed.

    Exit codes: 0 none grows significantly by more than 2 % (and 1 MiB) an hour, the audit proves the run, nothing is
    left over; 1 otherwise.
    """
    raise_interrupt_on_signals()
    folder = (out or Path(tempfile.mkdtemp(prefix="offbeat-soak-")) / "run").resolve()
    report = _run_soak(folder, minutes, overrides or [], plot, typer.echo)
    write_report(as_json, report.as_tree())
    _show(report, folder)
    raise typer.Exit(0 if report.passed else 1)


def _run_soak(
    folder: Path, minutes: float, overrides: Sequence[str], plot: Path | None, echo: Callable[[str], None]
) -> SoakReport:
    import psutil

    from offbeat.benchmarks.chaos.memory import MemoryLog, draw_memory
    from offbeat.benchmarks.chaos.run_monitor import RunUnderChaos
    from offbeat.benchmarks.chaos.session import CONFIG
    from offbeat.deploy.cli.audit import AuditError, examine
    from offbeat.deploy.local.processes import adopt_orphans

    adopt_orphans()
    report, log = SoakReport(minutes), MemoryLog()
    run = RunUnderChaos(CONFIG, folder, "soak", [*SOAK_OVERRIDES, *overrides], {})
    echo(f"the run's log: {run.log}")
    try:
        started = time.monotonic()
        while (run.step() or -1) < 1 and run.running and time.monotonic() < started + START_S:
            time.sleep(SAMPLE_S)
        log, began = MemoryLog(), time.monotonic()
        while run.running and time.monotonic() < began + 60 * minutes:
            run.record_processes()
            run.trim(METRICS, EVENTS)
            log.sample([psutil.Process(run.process.pid)])
            time.sleep(SAMPLE_S)
        if not run.running:
            report.complaints.append(f"the run ended by itself: exit code {run.process.returncode}, see {run.log}")
        else:
            run.process.send_signal(signal.SIGINT)
            if run.wait(END_S) != INTERRUPTED:
                report.complaints.append(f"the run did not end in order: {run.process.returncode}, see {run.log}")
    finally:
        run.close()
    report.leftovers = run.leftovers()
    try:
        result, _ = examine(folder)
        report.steps = result.lineage.last
        report.complaints += result.findings
    except AuditError as error:
        report.complaints.append(f"no audit: {error}")
    if log.duration_h == 0:
        report.complaints.append(f"no step in {START_S:.0f} s, see {run.log}")
        return report
    series = log.lasting_series()
    _check_growth(report, series, log.duration_h)
    if plot is not None:
        title = f"{report.steps} steps in {60 * log.duration_h:.0f} minutes"
        draw_memory(plot, title, series, log.duration_h)
    return report


def _check_growth(report: SoakReport, series: "Sequence[Series]", duration_h: float) -> None:
    from offbeat.benchmarks.chaos.memory import growth

    for process in series:
        hours, mib = process.after_settling(duration_h)
        trend = growth(hours, mib) if hours else None
        if trend is None:
            report.complaints.append(
                f"{process.kind} (process {process.pid}): {len(mib)} samples are too few, soak for longer"
            )
            continue
        grows = trend.exceeds(max(LEAK_SHARE * statistics.median(mib), MIN_GROWTH_MIB))
        report.rows.append(_row(process, trend, mib, grows=grows))
        if grows:
            report.complaints.append(
                f"{process.kind} (process {process.pid}) grows by {trend.per_hour:.1f} ± {trend.error:.1f} MiB an hour, "
                f"by {trend.late:.1f} in the second half of the time"
            )


def _row(process: "Series", trend: "Growth", mib: "Sequence[float]", *, grows: bool) -> dict[str, Any]:
    return {
        "kind": process.kind,
        "pid": process.pid,
        "first_mib": round(mib[0], 1),
        "last_mib": round(mib[-1], 1),
        "mib_per_hour": round(trend.per_hour, 2),
        "error": round(trend.error, 2),
        "late_mib_per_hour": round(trend.late, 2),
        "lowest_mib": round(min(mib), 1),
        "highest_mib": round(max(mib), 1),
        "grows": grows,
        "files": [process.files[0], process.files[-1]],
        "samples": len(mib),
    }


def _show(report: SoakReport, folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "process", "MiB, settled", "at the end", "lowest to highest", "MiB an hour", "late", "files", box=None
    )
    for row in report.rows:
        slope = f"{row['mib_per_hour']:+.1f} ± {row['error']:.1f}{' grows' if row['grows'] else ''}"
        files = " -> ".join(map(str, row["files"]))
        span = f"{row['lowest_mib']:.1f} to {row['highest_mib']:.1f}"
        late = f"{row['late_mib_per_hour']:+.1f}"
        table.add_row(row["kind"], f"{row['first_mib']:.1f}", f"{row['last_mib']:.1f}", span, slope, late, files)
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(
        f"{report.steps} steps; growth in the last two thirds, with one standard error; late: in the second half of them"
    )
    console.print(
        f"Redis was made to keep {METRICS:,} records of metrics and {EVENTS:,} events: its own bounds take hours to reach"
    )
    for line in (*report.complaints, *(f"left behind: {leftover}" for leftover in report.leftovers)):
        console.print(f"  - {line}")
    console.print(f"{'PASSED' if report.passed else 'FAILED'}: {folder}")
