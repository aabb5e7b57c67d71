"""Report from a run's records and folder: `report.json`, learning curve, rendered episodes, table."""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.report.baselines import run_baselines
from offbeat.deploy.report.curve import SMOOTHED_STEPS, CurvePoint, draw_learning_curve, smooth
from offbeat.deploy.report.history import RunHistory, Step
from offbeat.deploy.run_folder import newest_saved
from offbeat.services.control.failed_groups import advise_failed
from offbeat.services.control.failing_episodes import find_failing
from offbeat.services.control.schemas import CountersView
from offbeat.services.diagnosis import diagnose
from offbeat.services.findings import RunFinding
from offbeat.services.rollout.data.config import GROUP_SIZES
from offbeat.trainer.rendering.episodes import (
    PlayedEpisode,
    play_again,
    write_gif,
    write_html,
)
from offbeat.trainer.rendering.recorded_episodes import read_recorded_episodes

logger = logging.getLogger(__name__)

REPORT = "report.json"
CURVE = "learning_curve.png"
GIF = "episodes.gif"
HTML = "episodes.html"


class ReportMaker:
    """`draw` and `render` may take minutes; then call `write`."""

    def __init__(self, config: RunConfig, history: RunHistory) -> None:
        self._config = config
        self._history = history
        self._folder = config.output_dir
        self._baselines: dict[str, float] = {}
        self._report: dict[str, Any] = {}
        self.timings: Mapping[str, float] = {}

    def draw(self) -> None:
        """Play the baselines and draw the curve."""
        self._baselines = run_baselines(self._config)
        draw_curve(self._folder / CURVE, self._config, self._history, self._baselines)

    def render(self) -> None:
        """Play recorded episodes again, in envs that may start processes, and render them."""
        render_episodes(self._folder, self._config)

    def write(self, counters: CountersView | None, *, ended_at: float) -> dict[str, Any]:
        """Write and return `report.json`. ended_at: Unix time."""
        self._report = build_report(
            self._config,
            self._history,
            counters,
            baselines=self._baselines,
            startup_s=self.timings,
            ended_at=ended_at,
        )
        text = json.dumps(self._report, indent=2, allow_nan=False)
        temporary = self._folder / f".{REPORT}.part"
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(self._folder / REPORT)  # a reader that waits for the file finds it complete
        return self._report

    def show(self, console: Console | None = None) -> None:
        show_report(self._report, self._folder, console or Console(highlight=False))


def build_report(
    config: RunConfig,
    history: RunHistory,
    counters: CountersView | None,
    *,
    baselines: Mapping[str, float],
    startup_s: Mapping[str, float],
    ended_at: float,
) -> dict[str, Any]:
    """Return all figures, times in seconds; None if not measured."""
    steps = history.steps.newest()
    trained = [step.values["tokens_trained"] for step in steps if "tokens_trained" in step.values]
    before, after = history.evaluation("before", "sampled"), history.evaluation("after", "sampled")
    staleness = [step.value("staleness_max") for step in steps if "staleness_max" in step.values]
    return {
        "exp_name": config.exp_name,
        "pipeline": config.pipeline,
        "seed": config.seed,
        **{
            f"{name}_{kind}": _success(history, kind, sampling)
            for name, sampling in (("success", "sampled"), ("greedy", "greedy"))
            for kind in ("before", "after")
        },
        "eval_episodes": after.episodes if after else before.episodes if before else 0,
        "baselines": dict(baselines),
        "ended_at": ended_at,
        "wall_s": round(history.seconds(ended_at), 2),
        "attempts": len(history.attempts),
        "phases_s": phases(history, ended_at),
        "startup_s": {name: round(seconds, 2) for name, seconds in startup_s.items()},
        "steps": steps[-1].number if steps else 0,
        "trajectories": int(sum(step.values["trajectories"] for step in steps if "trajectories" in step.values)),
        "tokens_generated": int(history.total("generation/tokens")),
        "prefix_cache_hit_rate": _mean(history, "generation/prefix_cache_hit_rate"),
        "tokens_trained": int(sum(trained)),
        "training_loss": _training_loss(steps),
        "weight_updates": int(history.total("generation/weight_updates")),
        "pause_mean_s": _mean(history, "generation/pause_s"),
        "pause_max_s": history.peaks.get("generation/pause_max_s"),
        "max_staleness": config.max_staleness,
        "max_staleness_seen": max(staleness) if staleness else None,
        "groups_admitted": counters.admitted if counters else None,
        "groups_trained": counters.trained if counters else None,
        "groups_dropped": counters.dropped if counters else None,
        "groups_failed": counters.failed if counters else None,
        "groups_in_flight": counters.in_flight if counters else None,
        "mismatch_kl": _mean(history, "learner/actor/mismatch_kl"),
        "mismatch_abs_max": history.peaks.get("learner/actor/mismatch_abs_max"),
        "diagnosis": [asdict(finding) for finding in _diagnose(config, history)],
        "evaluations": [
            {
                "kind": evaluation.kind,
                "sampling": evaluation.sampling,
                "step": evaluation.step,
                "at_s": round(history.seconds(evaluation.time), 2),
                "success": _finite(evaluation.success),
                "success_missing": _finite(evaluation.success_missing),
                "reward": _finite(evaluation.reward),
                "loss": _finite(evaluation.loss),
                "episodes": evaluation.episodes,
                "metrics": {name: value for name, value in evaluation.values.items() if math.isfinite(value)},
            }
            for evaluation in sorted(
                history.evaluations.values(), key=lambda evaluation: (evaluation.time, evaluation.sampling)
            )
        ],
    }


def _diagnose(config: RunConfig, history: RunHistory) -> list[RunFinding]:
    failing = find_failing(history.totals)
    return [*([failing] if failing is not None else []), *diagnose(history.window, config.limits)]


def _success(history: RunHistory, kind: str, sampling: str) -> float | None:
    evaluation = history.evaluation(kind, sampling)
    return None if evaluation is None else _finite(evaluation.success)


def _mean(history: RunHistory, key: str) -> float | None:
    partial = history.means.get(key)
    return None if partial is None else _finite(partial.value)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def phases(history: RunHistory, ended_at: float) -> dict[str, float]:
    """Return seconds before the first step, of training, and after."""
    steps = history.steps.newest()
    if not steps:
        return {}
    began = [evaluation.time for evaluation in history.evaluations.values() if evaluation.kind == "before"]
    marks = [history.seconds(time) for time in (max(began, default=steps[0].time), steps[-1].time, ended_at)]
    return {
        "before_training": round(marks[0], 2),
        "training": round(marks[1] - marks[0], 2),
        "after_training": round(marks[2] - marks[1], 2),
    }


def _training_loss(steps: Sequence[Step]) -> dict[str, float] | None:
    """Return the smoothed first and last loss of a data pipeline."""
    losses = [step.values["loss"] for step in steps if "loss" in step.values]
    smoothed = smooth(losses, SMOOTHED_STEPS)
    return {"before": smoothed[0], "after": smoothed[-1]} if smoothed else None


def read_report(folder: Path) -> dict[str, Any]:
    """Return `report.json`; empty if unreadable."""
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}


def draw_curve(path: Path, config: RunConfig, history: RunHistory, baselines: Mapping[str, float]) -> None:
    """Draw the loss of a data pipeline, else success, else reward."""
    steps = history.steps.newest()
    names, sampling = (("loss", "success"), "loss") if config.reads_data else (("success",), "sampled")
    metric = next((name for name in names if any(name in step.values for step in steps)), "reward")
    draw_learning_curve(
        path,
        title=f"{config.exp_name}, seed {config.seed}",
        rollout=[CurvePoint(s.number, history.seconds(s.time), s.value(metric)) for s in steps if metric in s.values],
        evaluations=[CurvePoint(e.step, history.seconds(e.time), getattr(e, metric)) for e in history.curve(sampling)],
        baselines=baselines if metric == "success" else {},
        metric=metric,
    )


def render_episodes(folder: Path, config: RunConfig) -> None:
    episodes: list[PlayedEpisode] = []
    for recorded in read_recorded_episodes(folder, config.render_episodes):
        try:
            episodes.append(play_again(config, recorded))
        except Exception:
            # User code: a failed rendering must not prevent the report.
            logger.exception("rendering %s with seed %d failed", recorded.tag, recorded.seed)
    try:
        if episodes:
            write_gif(folder / GIF, episodes)
            write_html(folder / HTML, episodes, title=f"{config.exp_name}: episodes")
    except Exception:
        logger.exception("the episodes are not rendered")


def show_report(report: Mapping[str, Any], folder: Path, console: Console) -> None:
    has_episodes = report["pipeline"] not in GROUP_SIZES
    table = Table(
        title=f"{report['exp_name']} after {report['steps']} steps, {report['wall_s']:.0f} s", title_justify="left"
    )
    table.add_column("on held-out tasks" if has_episodes else "")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for measure in ("success", "reward"):
        for sampling in ("sampled", "greedy"):
            before, after = (_newest_measure(report, kind, sampling, measure) for kind in ("before", "after"))
            if has_episodes or before is not None:
                table.add_row(f"{measure}, {sampling}", _format(before), _format(after))
    if training := report.get("training_loss"):
        of = "new pairs" if has_episodes else "training rows"
        table.add_row(f"loss of {of}", _format(training["before"], ".4f"), _format(training["after"], ".4f"))
    losses = [_newest_measure(report, kind, "loss", "loss") for kind in ("before", "after")]
    if any(loss is not None for loss in losses):
        table.add_row("loss of validation rows", *(_format(loss, ".4f") for loss in losses))
    for label, *figures in _evaluation_rows(report):
        table.add_row(escape(label), *figures)
    missing = [_newest_measure(report, kind, "sampled", "success_missing") for kind in ("before", "after")]
    if any(missing):
        table.add_row("episodes without success", *(_format(share, ".0%") for share in missing))
    console.print(table if report["evaluations"] or not has_episodes else f"{table.title}, without an evaluation")
    if report["groups_failed"]:
        console.print(f"{advise_failed(report['groups_failed'])}.", soft_wrap=True)
    if report["baselines"]:
        console.print("Baselines: " + ", ".join(f"{name} {value:.2f}" for name, value in report["baselines"].items()))
    hit_rate = report.get("prefix_cache_hit_rate")
    cached = "" if hit_rate is None else f" ({hit_rate:.0%} of prompt tokens cached)"
    lag = report["max_staleness_seen"]  # which rows lack, whose responses may be sampled (`distill.lmbda`)
    sampled = (
        f", {report['tokens_generated']:,} tokens generated{cached}, {report['tokens_trained']:,} trained, "
        f"{report['weight_updates']:,} weight updates" + ("" if lag is None else f", staleness at most {lag:.0f}")
        if has_episodes or report["tokens_generated"]
        else f", {report['tokens_trained']:,} tokens"
    )
    console.print(f"{report['trajectories']:,} trajectories trained{sampled}", soft_wrap=True)
    for finding in report["diagnosis"]:
        kind = "Warning" if finding["is_warning"] else "Hint"
        keys = ", ".join(finding["keys"])
        console.print(f"{kind}: {finding['seen']}: {finding['cause']} ({keys})", soft_wrap=True, markup=False)
    for label, path in _file_paths(folder):
        console.print(f"  {label:<16} {path}", soft_wrap=True, markup=False)


MEASURES = {
    "reward, least": "reward_min",
    "reward, greatest": "reward_max",
    "turns per episode": "turns",
    "tokens per episode": "tokens/response_length/mean",
    "answers cut short": "answers_truncated",
}
TAG_MEASURES = {
    "success": "success",
    "reward": "reward",
    "reward, least": "reward_min",
    "reward, greatest": "reward_max",
}
"""Of each of several tags."""


def _evaluation_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield rows of the sampled evaluations before and after, in total and by tag."""
    newest = [
        [row.get("metrics", {}) for row in report["evaluations"] if (row["kind"], row["sampling"]) == (kind, "sampled")]
        for kind in ("before", "after")
    ]
    before, after = (metrics[-1] if metrics else {} for metrics in newest)
    names = dict.fromkeys([*before, *after])
    of_tags = [name.removeprefix("env/") for name in names if name.startswith("env/")]
    tags = [name.removesuffix("/episodes") for name in of_tags if name.endswith("/episodes")]
    rows = MEASURES | {name: name for name in names if name.startswith("pass@")}
    if len(tags) > 1:
        rows |= {f"{tag}: {label}": f"env/{tag}/{name}" for tag in tags for label, name in TAG_MEASURES.items()}
        passed = [name.rpartition("/") for name in of_tags]
        rows |= {f"{tag}: {name}": f"env/{tag}/{name}" for tag, _, name in passed if name.startswith("pass@")}
    for label, name in rows.items():
        if name in names:
            yield label, _format(before.get(name)), _format(after.get(name))


def _newest_measure(report: Mapping[str, Any], kind: str, sampling: str, measure: str) -> float | None:
    values = [row.get(measure) for row in report["evaluations"] if (row["kind"], row["sampling"]) == (kind, sampling)]
    return values[-1] if values else None


def _format(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def _file_paths(folder: Path) -> list[tuple[str, str]]:
    newest = newest_saved(folder)
    saved = newest[1] if newest else folder / "checkpoints"
    places = [
        *([("checkpoint", saved)] if isinstance(saved, Path) else []),
        ("TensorBoard", folder / "tensorboard"),
        ("learning curve", folder / CURVE),
        ("episodes", folder / HTML),
        ("animation", folder / GIF),
        ("report", folder / REPORT),
        ("logs", folder / "logs"),
    ]
    here = Path.cwd()
    shown = [
        (label, str(path.relative_to(here) if path.is_relative_to(here) else path))
        for label, path in places
        if path.exists()
    ]
    return [("checkpoint", saved), *shown] if isinstance(saved, str) else shown
