"""Result of a benchmark: table and JSON."""

import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import offbeat

PIPED_WIDTH = 140
_shown: list["ShownTable"] = []
"""Of this process, for its JSON."""


@dataclass(frozen=True, slots=True)
class ShownTable:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1], len(ordered))


T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5 % quantiles of Student's t distribution with 1, 2, ... degrees of freedom."""


@dataclass(frozen=True, slots=True)
class MeanInterval:
    mean: float
    low: float
    high: float
    """Of the 95 % confidence interval by Student's t distribution."""


def mean_interval(values: Sequence[float]) -> MeanInterval:
    """values: at least two."""
    mean = statistics.fmean(values)
    half = T_975[min(len(values) - 1, len(T_975)) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return MeanInterval(mean, mean - half, mean + half)


def write_json(path: Path, bench: str, options: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    document = {
        "bench": bench,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "build": build(),
        "machine": machine(),
        "options": dict(options),
        "tables": _shown,
        **result,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2, default=_plain) + "\n", encoding="utf-8")


@cache
def build() -> str:
    """Return the version, and in a checkout the commit, `+` if files differ from it."""
    file = Path(__file__).resolve()

    def git(*command: str) -> str:
        return subprocess.run(
            ["git", "-C", str(file.parent), *command], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)  # an installation may lie in another project's checkout
        return f"{offbeat.__version__} {git('describe', '--always', '--abbrev=8', '--exclude=*', '--dirty=+')}"
    except (OSError, subprocess.CalledProcessError):
        return offbeat.__version__


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "load": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def cpu_name() -> str:
    """Return the processor's name; empty where `/proc/cpuinfo` does not have it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return ""


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    table = Table(*columns, title=title, title_justify="left", header_style="bold")
    cells = tuple(tuple(cell(value) for value in row) for row in rows)
    for row in cells:
        table.add_row(*row)
    _shown.append(ShownTable(title, tuple(columns), cells))
    console().print(table)


def console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH)


def cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no place in a benchmark's JSON")
