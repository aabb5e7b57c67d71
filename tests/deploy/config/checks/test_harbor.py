"""Limits of a tag that cut its episodes before the verifier are found before the start."""

import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.deploy.config.checks.harbor import check_harbor
from offbeat.deploy.config.checks.run import check_run
from offbeat.deploy.config.loader import compose_tree, validate_tree
from offbeat.deploy.config.run import RunConfig
from tests.envs.harbor.task_folder import TaskFolder, needs_shell
from tests.paths import CONFIGS


def problems(env_config: dict[str, Any] | None = None, **rules: Any) -> dict[str, str]:
    tag = {"env_type": "harbor", "env_config": env_config or {}, **rules}
    config = RunConfig.model_validate_json(json.dumps({"custom_envs": {"H": tag}}))
    return {issue.path.removeprefix("custom_envs.H."): issue.message for issue in check_harbor(config)}


def test_the_defaults_of_a_tag_end_an_episode_before_its_verifier() -> None:
    found = problems()
    assert found.keys() == {"max_steps", "step_timeout_s"}
    assert "take 30, or a smaller env_config.max_steps" in found["max_steps"]
    assert "a command (20 s) and a verifier (20 s): take more than 40" in found["step_timeout_s"]


@pytest.mark.parametrize(
    ("env_config", "rules"),
    [
        ({}, {"max_steps": 30, "step_timeout_s": 41}),
        ({"max_steps": 10, "max_verifier_timeout_s": 5, "command_timeout_s": 10}, {}),
        ({"played_by": "agent"}, {}),
    ],
)
def test_fitting_limits_pass(env_config: dict[str, Any], rules: dict[str, Any]) -> None:
    assert problems(env_config, **rules) == {}


def test_the_slowest_verifier_counts_held_out_tasks_included(tmp_path: Path) -> None:
    for name, timeout in (("train", 10), ("val", 300)):
        (tmp_path / name).mkdir()
        TaskFolder(tmp_path / name).write("task.toml", f"[verifier]\ntimeout_sec = {timeout}\n")
    folders = {"tasks_dir": str(tmp_path / "train"), "val_tasks_dir": str(tmp_path / "val")}
    found = problems(folders, max_steps=30, step_timeout_s=60)
    assert "a verifier (300 s): take more than 320" in found["step_timeout_s"]
    assert problems(folders, max_steps=30, step_timeout_s=321) == {}


@needs_shell
def test_only_a_run_that_is_started_anew_is_refused() -> None:
    overrides = ["custom_envs.Terminal.max_steps=3", "pretrain=tiny"]
    config = validate_tree(compose_tree(CONFIGS / "terminal.yaml", overrides))
    assert [issue.path for issue in check_run(config, cores=2, trial=False)] == ["custom_envs.Terminal.max_steps"]
    assert check_run(config, cores=2, trial=False, started=True) == []
