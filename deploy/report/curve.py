"""Plot of the learning curve, with baselines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SMOOTHED_STEPS = 9
"""Window of the thick line."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    step: int
    seconds: float
    """Since the run's start."""
    success: float


def draw_learning_curve(
    path: Path,
    *,
    title: str,
    rollout: Sequence[CurvePoint],
    evaluations: Sequence[CurvePoint],
    baselines: Mapping[str, float],
    metric: str = "success",
) -> None:
    from matplotlib.figure import Figure

    of_rows = metric == "loss"
    trained = "training" if of_rows else "training rollouts (sampled)"
    evaluated = "validation rows" if of_rows else "evaluation (sampled)"
    figure = Figure(figsize=(11, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    figure.suptitle(title)
    for axis, name, label in ((axes[0], "step", "optimizer steps"), (axes[1], "seconds", "seconds since the start")):
        xs = [float(getattr(point, name)) for point in rollout]
        ys = [point.success for point in rollout]
        axis.plot(xs, ys, color="tab:blue", alpha=0.25, linewidth=0.8)
        axis.plot(
            xs,
            smooth(ys, SMOOTHED_STEPS),
            color="tab:blue",
            label=trained,
        )
        if evaluations:
            axis.plot(
                [float(getattr(point, name)) for point in evaluations],
                [point.success for point in evaluations],
                color="tab:red",
                marker="o",
                markersize=4,
                label=evaluated,
            )
        for (baseline, value), style in zip(baselines.items(), (":", "--", "-."), strict=False):
            axis.axhline(value, color="gray", linestyle=style, linewidth=1, label=f"{baseline} ({value:.2f})")
        axis.set_xlabel(label)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel(metric)
    if metric == "success":
        axes[0].set_ylim(-0.02, 1.02)
    axes[1].legend(loc="upper right" if of_rows else "lower right", fontsize=8)
    figure.savefig(path)


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Return the centred running mean, narrower at both ends."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    half = width // 2
    out: list[float] = []
    for i in range(len(values)):
        start, end = max(i - half, 0), min(i + half + 1, len(values))
        out.append(float(sums[end] - sums[start]) / (end - start))
    return out
