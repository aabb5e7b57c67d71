"""Plots of runs of a pipeline over seeds, as SVG files that are readable on light and dark pages."""

# pyright: basic
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from offbeat import Run
from offbeat.deploy.report.curve import SMOOTHED_STEPS, smooth

mpl.use("Agg")

SEED_COLORS = ("#4c8dd6", "#d9822b", "#3fa66a", "#a371f7", "#c96198")
GRAY = "#8b949e"
STYLE = """<style>
@media (prefers-color-scheme: dark) {
#background path {fill: #0d1117 !important}
text {fill: #e6edf3 !important}
#mean path {stroke: #e6edf3 !important}
}
</style>
"""
"""Overrides of the inline styles; renderers without it show the light ones."""


@dataclass(frozen=True)
class Panel:
    source: str
    """`learner`, or the sampling of an evaluation."""
    metric: str
    label: str

    def curve(self, run: Run) -> tuple[list[float], list[float]]:
        """Return steps and values; of a training metric the running mean."""
        is_trained = self.source == "learner"
        values: dict[float, float] = {}
        for row in run.metrics("learner" if is_trained else "eval").to_dict("records"):
            value = row.get(self.metric)
            if value == value and value is not None and (is_trained or row["label.sampling"] == self.source):
                values[row["step"]] = value
        steps = sorted(values)
        ordered = [values[step] for step in steps]
        return steps, smooth(ordered, SMOOTHED_STEPS) if is_trained else ordered


LAKES = Panel("sampled", "success", "success on held-out lakes")
PANELS = {
    "sft": (Panel("loss", "loss", "loss of validation rows, nats"), LAKES),
    "dpo": (Panel("loss", "rewards/accuracies", "accuracy on validation pairs"), LAKES),
    "dpo_episodes": (Panel("learner", "rewards/accuracies", "accuracy on pairs in training"), LAKES),
    "distill": (Panel("loss", "kd_loss", "divergence on validation rows, nats"), LAKES),
    "rlvr": (Panel("sampled", "success", "held-out problems solved"),),
    "rlvr_code": (Panel("sampled", "success", "held-out tasks solved"),),
}


def draw(name: str, runs: Mapping[int, Run], path: Path, *, teachers: Sequence[float] = ()) -> None:
    """Plot each panel of a pipeline: a line for each seed, and their mean at the steps that all have.

    teachers: success of the runs' teachers, drawn as dotted lines in the seeds' colors.
    """
    panels = PANELS[name]
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif", "font.size": 9}):
        figure = Figure(figsize=(4.4 * len(panels), 3.2), layout="constrained")
        figure.patch.set_gid("background")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _panel(axes, panel, runs, teachers if panel is LAKES else ())
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    head, tag, rest = text.getvalue().partition("<defs>")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{head}{STYLE}{tag}{rest}", encoding="utf-8")


def _panel(axes: Axes, panel: Panel, runs: Mapping[int, Run], teachers: Sequence[float]) -> None:
    axes.patch.set_alpha(0.0)
    curves = {seed: panel.curve(run) for seed, run in runs.items()}
    for (seed, (steps, values)), color in zip(curves.items(), SEED_COLORS, strict=False):
        marker = None if panel.source == "learner" else "o"
        axes.plot(steps, values, color=color, linewidth=1.2, marker=marker, markersize=3, label=f"seed {seed}")
    for teacher, color in zip(teachers, SEED_COLORS, strict=False):
        axes.axhline(teacher, color=color, linewidth=1, linestyle=":")
    if teachers:
        axes.plot([], [], color=GRAY, linewidth=1, linestyle=":", label="their teachers")
    shared = sorted(set.intersection(*(set(steps) for steps, _ in curves.values())))
    if len(curves) > 1:
        means = [np.mean([values[steps.index(step)] for steps, values in curves.values()]) for step in shared]
        axes.plot(shared, means, color="black", linewidth=2.2, label="mean", gid="mean")
    axes.set_xlabel("steps")
    axes.set_ylabel(panel.label)
    axes.set_ylim(bottom=0)
    if panel.metric != "loss" and panel.metric != "kd_loss":
        axes.set_ylim(0, 1.02)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRAY)
    axes.tick_params(color=GRAY)
    axes.grid(color=GRAY, alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
