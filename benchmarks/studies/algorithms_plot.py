"""`python -m offbeat.benchmarks.studies.algorithms_plot DIR PNG`: success by algorithm and staleness bound, with
standard errors.
"""

# pyright: basic
import json
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

mpl.use("Agg")

Row = dict[str, Any]


def load(folder: Path, kind: str) -> list[Row]:
    file = folder / f"results-{kind}.json"
    return [row for row in json.loads(file.read_text()) if "failed" not in row] if file.exists() else []


def error(row: Row) -> float:
    share = row["success_after"]
    return math.sqrt(share * (1 - share) / row["eval_episodes"])


def algorithms(axes: Axes, rows: list[Row]) -> None:
    """Plot a row per algorithm, best first."""
    rows = sorted(rows, key=lambda row: row["success_after"])
    places = range(len(rows))
    axes.errorbar(
        [row["success_after"] for row in rows], places, xerr=[error(row) for row in rows], fmt="o", label="after"
    )
    axes.plot([row["greedy_after"] for row in rows], places, "x", color="#9aa5b1", label="after, greedy")
    axes.axvline(rows[0]["success_before"], color="#d62728", linestyle=":", label="before")
    axes.set_yticks(places, [row["name"] for row in rows], fontsize=7)
    axes.set_xlim(0, 1)
    axes.set_xlabel(f"success on {rows[0]['eval_episodes']} held-out maps, {rows[0]['steps']} steps, bound 1")
    axes.legend(fontsize=7, loc="center left")


def staleness(axes: Axes, rows: list[Row]) -> None:
    """Plot a curve per algorithm over equally spaced bounds."""
    bounds = sorted({row["staleness"] for row in rows})
    names = list(dict.fromkeys(row["name"] for row in rows))
    for number, name in enumerate(names):
        own = sorted((row for row in rows if row["name"] == name), key=lambda row: row["staleness"])
        places = [bounds.index(row["staleness"]) + 0.06 * (number - len(names) / 2) for row in own]
        axes.errorbar(
            places, [row["success_after"] for row in own], yerr=[error(row) for row in own], fmt="o-", capsize=2, label=name
        )  # fmt: skip
    axes.axhline(rows[0]["success_before"], color="#d62728", linestyle=":", label="before")
    axes.set_xticks(range(len(bounds)), [f"{bound}" for bound in bounds])
    axes.set_ylim(0, 1)
    axes.set_xlabel(f"max_staleness, {rows[0]['steps']} steps")
    axes.set_ylabel("success afterwards")
    axes.legend(fontsize=7)


def draw(folder: Path, plot: Path) -> None:
    plots = [(algorithms, load(folder, "algorithms")), (staleness, load(folder, "staleness"))]
    panels = [(paint, rows) for paint, rows in plots if rows]
    if not panels:
        raise SystemExit(f"{folder}: no results-algorithms.json or results-staleness.json with a run that ended")
    figure = Figure(figsize=(6 * len(panels), 5.5), layout="constrained")
    for axes, (paint, rows) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        paint(axes, rows)
    plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(plot, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
