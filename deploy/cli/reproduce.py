"""`offbeat learner reproduce`."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from offbeat.deploy import run_folder
from offbeat.deploy.cli.audit import AuditError, find_folder
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import load_run
from offbeat.services.errors import CodecError, ControlError

if TYPE_CHECKING:
    from offbeat.trainer.training.reproduction import ReproductionResult, SampleView

SHOWN = 40


class ReproduceError(Exception):
    """Run that can't be reproduced."""


def reproduce_run(run: str, step: int | None, *, console: Console, as_json: bool) -> int:
    """Reproduce a run; return the exit code. Raises `ReproduceError`."""
    try:
        folder = find_folder(run)
        config = load_run(folder / run_folder.CONFIG, started=True).model_copy(update={"output_dir": folder})
    except (AuditError, ConfigError) as error:
        raise ReproduceError(str(error)) from error
    from offbeat.trainer.run import LearnerRun, prepare_environment

    prepare_environment(config)
    from offbeat.trainer.engines.process_group import process_group, ranks_of_environment
    from offbeat.trainer.training.reproduction import find_plan, reproduce

    learner_run = LearnerRun(config.exp_name, "reproduce", folder, config)
    show = _discard if as_json else console.print
    try:
        plan, ranks = find_plan(learner_run, step), ranks_of_environment(config.actor_train.device)
        with process_group(ranks):
            reproduced = reproduce(learner_run, plan, ranks, sample_step=step, show=show)
    except (ControlError, CodecError, RuntimeError, OSError, ValueError) as error:  # ValueError: scores are missing
        raise ReproduceError(str(error)) from error
    if as_json:
        json.dump(_as_tree(reproduced), console.file, indent=2)
        console.file.write("\n")
    else:
        _show(reproduced, step, console)
    return 0 if all(weights.equal for weights in reproduced.compared) else 1


def _as_tree(reproduced: "ReproductionResult") -> dict[str, Any]:
    """Return JSON values; a difference that is not finite, as of other shapes, is None."""
    tree = asdict(reproduced)
    for weights in tree["compared"]:
        if not math.isfinite(weights["largest_difference"]):
            weights["largest_difference"] = None
    return tree


def _discard(_: str) -> None:
    """Discard a message."""


def _show(reproduced: "ReproductionResult", step: int | None, console: Console) -> None:
    if step is not None and reproduced.samples:
        console.print(_table(step, reproduced.samples))
    elif step is not None:
        console.print(f"step {step}: no trajectories with ratios and advantages to show")
    if not reproduced.compared:
        console.print("no later checkpoint to compare the weights with")


def _table(step: int, samples: Sequence["SampleView"]) -> Table:
    title = f"step {step}: {len(samples)} trained trajectories"
    table = Table(
        title=title if len(samples) <= SHOWN else f"{title}, the first {SHOWN}", title_justify="left", box=None
    )
    for column in ("group", "member", "reward", "turns", "tokens", "versions", "lag", "ratio", "max", "advantage"):
        table.add_column(column, justify="right")
    for sample in samples[:SHOWN]:
        low, high = sample.advantage_min, sample.advantage_max
        table.add_row(
            str(sample.group),
            str(sample.index),
            f"{sample.reward:.3g}",
            str(sample.turns),
            str(sample.tokens),
            f"{sample.versions[0]}-{sample.versions[1]}"
            if sample.versions[0] != sample.versions[1]
            else str(sample.versions[0]),
            str(sample.staleness),
            f"{sample.ratio_mean:.4f}",
            f"{sample.ratio_max:.4f}",
            f"{low:+.3f}" if low == high else f"{sample.advantage_mean:+.3f} [{low:+.3f}, {high:+.3f}]",
        )
    return table
