from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLORS = {"offbeat": "tab:blue", "trl": "tab:orange"}
NAMES = {"offbeat": "Offbeat", "trl": "TRL"}


def draw(path: Path, settings: Sequence[dict[str, Any]]) -> None:
    """Write a PNG; settings: results of `compare` with `setting` and `title`."""
    from matplotlib.figure import Figure

    shown = [
        setting
        for setting in settings
        if any(run["curve"] for side in setting["sides"].values() for run in side["runs"])
    ]
    if not shown:
        return
    figure = Figure(figsize=(5.5 * len(shown), 4.2), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axis, setting in zip(panels, shown, strict=True):
        for side, of in setting["sides"].items():
            for number, run in enumerate(of["runs"]):
                seconds = [point["seconds"] for point in run["curve"]]
                successes = [point["success"] for point in run["curve"]]
                label = NAMES[side] if number == 0 else None
                axis.plot(seconds, successes, color=COLORS[side], marker="o", markersize=3, alpha=0.8, label=label)
        axis.set_title(f"({setting['setting']}) {setting['title']}", fontsize=9)
        axis.set_xlabel("seconds of training")
        axis.set_ylim(-0.02, 1.02)
        axis.grid(alpha=0.25)
    panels[0].set_ylabel("success on held-out maps, sampled")
    panels[0].legend(loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
