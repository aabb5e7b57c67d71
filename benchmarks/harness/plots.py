"""Plots of benchmark results."""

# pyright: basic
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

mpl.use("Agg")

OURS, THEIRS, LIMIT = "#1f77b4", "#9aa5b1", "#d62728"
SIDES = (
    ("bare", "bare AsyncLLM", THEIRS),
    ("handle", "service, Serve handle", OURS),
    ("http", "service, HTTP", "#2ca02c"),
)


def draw(result: Path, plot: Path) -> None:
    """Plot a benchmark's JSON as a PNG.

    Raises:
        ValueError: there is no plot of this benchmark.
    """
    result_json = json.loads(result.read_text(encoding="utf-8"))
    painter = PAINTERS.get(result_json.get("bench", ""))
    if painter is None:
        raise ValueError(
            f"{result}: there are plots of {', '.join(sorted(PAINTERS))}, not of {result_json.get('bench')!r}"
        )
    figure = painter(result_json)
    plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(plot, dpi=120, bbox_inches="tight")


def _async(result: dict[str, Any]) -> Figure:
    parts = result["distributions"]
    figure, axes = _panels(len(parts))
    for part, ax in zip(parts, axes, strict=True):
        rows = part["settings"]
        names = [f"{row['max_staleness']:g}" for row in rows]
        bars = ax.bar(names, [row["trajectories_per_s"] for row in rows], color=[THEIRS] + [OURS] * (len(rows) - 1))
        ax.bar_label(bars, [f"{row['ratio']:.2f}x" for row in rows])
        ax.margins(y=0.25)
        ax.axhline(part["ideal"], color=LIMIT, linestyle="--", label="the slower side alone")
        _label(ax, f"{part['distribution']} latency", "max_staleness", "trajectories/s")
    return figure


def _redundancy(result: dict[str, Any]) -> Figure:
    parts = result["distributions"]
    figure, axes = _panels(len(parts))
    for (name, rows), ax in zip(parts.items(), axes, strict=True):
        labels = [f"{row['groups']}x{row['members']}" for row in rows]
        bars = ax.bar(labels, [row["batch_s"]["median"] for row in rows], color=[THEIRS] + [OURS] * (len(rows) - 1))
        ax.bar_label(bars, [f"{row['ratio']:.2f}x" for row in rows])
        ax.margins(y=0.1)
        _label(ax, f"{name} latency", "groups x episodes started", "s to collect the batch")
    return figure


def _scale(result: dict[str, Any]) -> Figure:
    figure, axes = _panels(2)
    counts = [row["concurrency"] for row in result["settings"]]
    panels = (("cpu_ms", "CPU ms per trajectory"), ("trajectories_per_s", "trajectories/s"))
    for ax, (name, label) in zip(axes, panels, strict=True):
        ax.semilogx(counts, [row[name]["median"] for row in result["settings"]], "o-", color=OURS)
        ax.set_ylim(bottom=0)
        _label(ax, "", "episodes at a time", label)
    return figure


def _generation(result: dict[str, Any]) -> Figure:
    figure, (ax,) = _panels(1)
    counts = [row["concurrency"] for row in result["levels"]]
    for name, label, color in SIDES:
        if f"{name}_tokens_per_s" in result["levels"][0]:
            rates = [row[f"{name}_tokens_per_s"]["median"] for row in result["levels"]]
            ax.loglog(counts, rates, "o-", color=color, label=label)
    _label(ax, "", "requests at a time", "tokens/s")
    return figure


PAINTERS: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "async": _async,
    "redundancy": _redundancy,
    "scale": _scale,
    "generation": _generation,
}


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(4.8 * count, 3.2))
    return figure, [figure.add_subplot(1, count, i + 1) for i in range(count)]


def _label(ax: Axes, title: str, x: str, y: str) -> None:
    ax.set_title(title)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.spines[["top", "right"]].set_visible(False)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, loc="upper left")
