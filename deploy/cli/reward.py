"""`offbeat reward`."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from offbeat.deploy.reward_check import Columns, RewardReport
    from offbeat.services.reward.config import RewardsConfig

EXIT_FOUND, EXIT_USAGE = 1, 2
MAX_SHOWN = 10
"""Of failed rows and disagreements."""

reward_app = typer.Typer(help="Check reward functions.", no_args_is_help=True)


@reward_app.callback()
def reward() -> None:
    """Check reward functions."""


@reward_app.command("check")
def check(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file with `rewards`, such as a run's.")],
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Responses: .jsonl, .json, .csv or .parquet.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Override values of CONFIG.")
    ] = None,
    response_key: Annotated[str, typer.Option(help="Column of responses.")] = "response",
    label_key: Annotated[str, typer.Option(help="Column of labels: the score that a row should have.")] = "label",
    threshold: Annotated[float, typer.Option(help="Scores and labels from here on are positive.")] = 0.5,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows to score, from the first.")] = None,
    slowest: Annotated[int, typer.Option(min=0, help="Slowest calls to list.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Score the responses of a file; print agreement with its labels, failures and the slowest calls.

    Rewards with `num_replicas` run in this process. Exit code 1 if a row could not be scored.
    """
    from offbeat.deploy.config.errors import ConfigError
    from offbeat.deploy.reward_check import check_rewards
    from offbeat.envs.dataset.files import open_rows

    try:
        rewards, columns = _read_config(Path(config), overrides or [], response_key, label_key)
        rows = open_rows(data, exact=(columns.response, columns.ground_truth))
        if response_key not in rows.columns:
            has = ", ".join(rows.columns)
            raise ValueError(f"{data} has no column {response_key!r} (--response-key); there is {has}")
        report = asyncio.run(check_rewards(rewards, rows, columns, threshold=threshold, limit=limit))
    except (ConfigError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_USAGE) from None
    if as_json:
        typer.echo(json.dumps(report.to_json(slowest), indent=2))
    else:
        _print(report, slowest, threshold)
    if report.failures:
        raise typer.Exit(EXIT_FOUND)


def _read_config(
    path: Path, overrides: list[str], response_key: str, label_key: str
) -> "tuple[RewardsConfig, Columns]":
    """Read `rewards`, `combine` and the columns of `data`; raises ConfigError."""
    from pydantic import ValidationError

    from offbeat.deploy.config.errors import ConfigError, collect_issues
    from offbeat.deploy.config.hub import download, resolve_models
    from offbeat.deploy.config.loader import compose_tree
    from offbeat.deploy.reward_check import Columns
    from offbeat.services.reward.config import RewardsConfig
    from offbeat.trainer.config.issue import ConfigIssue

    tree = compose_tree(path, overrides)
    if "rewards" not in tree:
        raise ConfigError([ConfigIssue("rewards", f"{path} has none: what should score the responses?")])
    given, issues = resolve_models({key: tree[key] for key in ("rewards", "combine") if key in tree}, download)
    if issues:
        raise ConfigError(issues, str(path))
    try:
        rewards = RewardsConfig.model_validate_json(json.dumps(given))
    except ValidationError as error:
        raise ConfigError(collect_issues(error, RewardsConfig), str(path)) from error
    named = _mapping(tree.get("data"))
    keys = ("ground_truth", "messages", "prompt", "images", "tag")
    names = {key: str(named[f"{key}_key"]) for key in keys if f"{key}_key" in named}
    tags = {value: tag for tag, values in _read_tags(named, path).items() for value in values}
    played = list(_mapping(tree.get("train_env_manager")).get("tags") or _mapping(tree.get("custom_envs")))
    default = str(played[0]) if len(played) == 1 else ""
    only = "" if tags else default  # as in a run
    return rewards, Columns(response_key, label_key, **names, tags=tags, default_tag=default, only_tag=only)


def _read_tags(data: Mapping[str, Any], path: Path) -> Mapping[str, Sequence[str]]:
    from pydantic import ValidationError

    from offbeat.deploy.config.errors import ConfigError, collect_issues
    from offbeat.services.rollout.data.config import DataConfig

    given = {name: data[name] for name in ("tag_included",) if name in data}
    try:
        return DataConfig.model_validate_json(json.dumps({"dataset_name": "rows.jsonl", **given})).tag_included
    except ValidationError as error:
        issues = [replace(issue, path=f"data.{issue.path}") for issue in collect_issues(error, DataConfig)]
        raise ConfigError(issues, str(path)) from error


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _print(report: "RewardReport", num_slowest: int, threshold: float) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    console = Console()
    is_labelled = any(each.num_labelled for each in report.agreements)
    columns = ["rows", "mean", "std", "ms", "max ms"]
    if is_labelled:
        columns += ["agreement", "false +/-", "rank corr."]
    # a narrow terminal folds long names and no number
    name = Column("reward", overflow="fold", min_width=6)
    table = Table(name, *(Column(title, no_wrap=True) for title in columns), box=None, pad_edge=False)
    for each in report.agreements:
        cells = [each.name, str(each.num_scored), f"{each.mean:.3f}", f"{each.std:.3f}"]
        cells += [f"{1000 * each.seconds_mean:.1f}", f"{1000 * each.seconds_max:.1f}"]
        if is_labelled:
            agreement, rho = (_format(value) for value in (each.agreement, each.rank_correlation))
            cells += [agreement, f"{each.false_positives}/{each.false_negatives}", rho]
        table.add_row(*cells)
    console.print(table)
    for reason, count in report.failures.items():
        console.print(f"{count} row(s) not scored: {reason}", style="red", markup=False)
    for row in [row for row in report.rows if row.failure][:MAX_SHOWN]:
        console.print(f"  {row.name}: {row.failure}", markup=False, soft_wrap=True)
    if report.disagreements:
        shown = ", ".join(report.disagreements[:MAX_SHOWN])
        more = len(report.disagreements) - MAX_SHOWN
        rest = f", and {more} more" if more > 0 else ""
        console.print(
            f"score and label on different sides of {threshold:g}: {shown}{rest}", markup=False, soft_wrap=True
        )
    for seconds, row, name in report.slowest(num_slowest):
        console.print(f"{1000 * seconds:8.1f} ms  {name}  {row}", markup=False, soft_wrap=True)


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
