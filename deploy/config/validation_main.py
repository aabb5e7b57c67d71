"""Process of one validation (`validation`)."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from offbeat.deploy.config.checks.prompts import OnStep
from offbeat.deploy.config.checks.run import check_run
from offbeat.deploy.config.device_plan import ClusterNode
from offbeat.deploy.config.rights import check_definitions
from offbeat.deploy.config.run import RunConfig
from offbeat.services.control.rights import Rights
from offbeat.services.rollout.child_main import serve
from offbeat.trainer.config.aliases import canonical_json
from offbeat.trainer.config.issue import ConfigIssue

Issue = tuple[str, str, str | None]


def _observer(stage_file: str) -> OnStep:
    """Record the running step in a file."""

    def note(key: str, doing: str) -> None:
        Path(stage_file).write_text(f"{key}\n{doing}", errors="replace")

    return note


def _read(text: str) -> RunConfig:
    return RunConfig.model_validate_json(canonical_json(text))


def _definitions(text: str, rights_text: str, stage_file: str) -> list[Issue]:
    rights = Rights(**{name: value and tuple(value) for name, value in json.loads(rights_text).items()})
    return _plain(check_definitions(_read(text), rights, _observer(stage_file)))


def _check(text: str, cores: float | None, nodes: list[list[Any]] | None, stage_file: str) -> list[Issue]:
    config = _read(text)
    cluster = None if nodes is None else [ClusterNode(*node) for node in nodes]
    return _plain(check_run(config, cores=cores, nodes=cluster, on_step=_observer(stage_file), trial=False))


def _plain(issues: Iterable[ConfigIssue]) -> list[Issue]:
    return [(issue.path, issue.message, issue.hint) for issue in issues]


if __name__ == "__main__":
    serve({"ping": lambda: None, "check_definitions": _definitions, "check": _check})
