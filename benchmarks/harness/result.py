"""Result of a benchmark: table and JSON."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PIPED_WIDTH = 140


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


def write_json(path: Path, bench: str, options: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    document = {
        "bench": bench,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "options": dict(options),
        **result,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2, default=_plain) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "load": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    table = Table(*columns, title=title, title_justify="left", header_style="bold")
    for row in rows:
        table.add_row(*(cell(value) for value in row))
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
