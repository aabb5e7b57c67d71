"""Imported keys fitted to the run's configuration: refused ones are reported, and removed or to be filled in."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from offbeat.deploy.config.checks.data import DATA_KEYS, check_epochs
from offbeat.deploy.config.checks.run import check_run
from offbeat.deploy.config.checks.sampling import OVERRIDES, check_own_arguments
from offbeat.deploy.config.checks.unused import check_unused
from offbeat.deploy.config.devices import choose_devices, count_gpus
from offbeat.deploy.config.errors import collect_issues
from offbeat.deploy.config.hub import MODEL_KEYS, is_hub_id
from offbeat.deploy.config.hub_datasets import is_dataset_id
from offbeat.deploy.config.importing.report import Imported, KeyPath, KeyReport, Outcome
from offbeat.deploy.config.importing.rules import Tree, get, remove
from offbeat.deploy.config.run import RunConfig
from offbeat.trainer.config.aliases import find_keys
from offbeat.trainer.config.issue import ConfigIssue

NO_EFFECT = "has no effect"
MAX_ROUNDS = 100
"""Each round removes keys."""


def fit(tree: Tree, reports: list[KeyReport]) -> tuple[list[KeyReport], list[ConfigIssue]]:
    """Remove unknown and ineffective keys from `tree`; return the reports and what remains to be filled in."""
    for _ in range(MAX_ROUNDS):
        issues = find_issues(tree)
        dropped = [issue for issue in issues if _is_dropped(issue, tree)]
        if not dropped:
            return reports, issues
        for issue in dropped:
            path = tuple(issue.path.split("."))
            reports = _report(reports, path, issue)
            remove(tree, path)
    return reports, find_issues(tree)


def find_issues(tree: Tree) -> list[ConfigIssue]:
    """Return refused keys, those without effect, and arguments of engines that follow from other keys."""
    try:
        config = RunConfig.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        return collect_issues(error, RunConfig)
    issues = (*check_unused(config), *check_own_arguments(config))
    return [issue for issue in issues if _is_dropped(issue, tree)]


def _is_dropped(issue: ConfigIssue, tree: Tree) -> bool:
    path = tuple(issue.path.split("."))
    is_refused = issue.hint is not None or issue.message.startswith((NO_EFFECT, OVERRIDES))
    return is_refused and get(tree, path, default=tree) is not tree


def _report(reports: list[KeyReport], path: KeyPath, issue: ConfigIssue) -> list[KeyReport]:
    """Change the outcome of the keys below `path`."""
    status = "no effect" if issue.message.startswith(NO_EFFECT) else "no counterpart"
    note = issue.message if issue.message.startswith((NO_EFFECT, OVERRIDES)) else "no such key here"
    return [
        replace(each, outcome=Outcome(status, note=note))
        if each.outcome.target is not None and each.outcome.target[: len(path)] == path
        else each
        for each in reports
        if not (
            each.outcome.status == "default"
            and each.outcome.target is not None
            and each.outcome.target[: len(path)] == path
        )
    ]


def check_imported(tree: Tree) -> list[ConfigIssue]:
    """Return issues of `offbeat config validate` on this machine, without the hub."""
    config = choose_devices(RunConfig.model_validate_json(json.dumps(tree)), count_gpus())
    epochs = check_epochs(config)
    issues = [*check_run(config, trial=False), *([] if epochs is None else [epochs])]
    return [_explain_id(issue, tree) for issue in issues]


def _explain_id(issue: ConfigIssue, tree: Tree) -> ConfigIssue:
    """Return the issue of an id of the hub, for what no folder or file of that name is found."""
    for keys, is_id, kind, local in (
        (MODEL_KEYS, is_hub_id, "model", "folder"),
        (DATA_KEYS, is_dataset_id, "dataset", "file"),
    ):
        for path, table in (each for pattern in keys for each in find_keys(tree, pattern)):
            name = table[path[-1]]
            if issue.path == ".".join(path) and isinstance(name, str) and is_id(name):
                message = f"{name} is a {kind} of the hub, which `offbeat train` takes; or set a {local}"
                return ConfigIssue(issue.path, message)
    return issue


def finish(path: Path, tree: Tree, reports: list[KeyReport], remarks: Sequence[str] = ()) -> Imported:
    reports, to_do = fit(tree, reports)
    return Imported(path, tree, tuple(reports), tuple(to_do), tuple(remarks))
