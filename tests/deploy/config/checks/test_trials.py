"""Envs that always fail are refused before anything starts."""

import logging
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offbeat.deploy.cli.app import app
from offbeat.deploy.config.checks.run import check_run
from offbeat.deploy.config.loader import compose_tree, validate_tree
from offbeat.deploy.config.run import RunConfig
from tests.fakes_rollout import HERE
from tests.paths import QUICKSTART

pytestmark = pytest.mark.slow


def config(**env: Any) -> RunConfig:
    """A quickstart whose only tag is such a faulty env."""
    loaded = validate_tree(compose_tree(QUICKSTART, ["warm_start=null"]))
    lake = loaded.custom_envs["FrozenLake"]
    changes = {
        "env_type": HERE + "BadEnv",
        "execution": "thread",
        "step_timeout_s": 2.0,
        "reset_timeout_s": 10.0,
        **env,
    }
    tree = {**lake.model_dump(mode="json"), "env_config": {"how": "raise"}, **changes}
    return loaded.model_copy(update={"custom_envs": {"FrozenLake": lake.model_validate(tree, strict=False)}})


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({}, ("can't be stepped: RuntimeError: broken", "on_env_error", 'raise RuntimeError("broken")')),
        ({"env_config": {"how": "raise", "when": "reset"}}, ("can't be reset: RuntimeError: broken",)),
        ({"env_config": {"how": "hang", "when": "step"}}, ("can't be stepped: no answer in 2 s",)),
        ({"env_config": {"how": "crash", "when": "step"}}, ("crashes: at step, exit status 7",)),
    ],
)
def test_an_env_that_always_fails_is_refused_with_its_traceback_once(env: dict[str, Any], says: tuple[str, ...]):
    (issue,) = check_run(config(**env))
    assert issue.path == "custom_envs.FrozenLake.env_type"
    for part in says:
        assert issue.message.count(part) == 1, issue.message
    assert "services/rollout" not in issue.message


def test_errors_with_a_reward_are_no_reason_to_refuse():
    assert check_run(config(on_env_error={"reward": -1.0})) == []
    assert check_run(config(on_env_error={"reward": -1.0, "reasons": ["step_timeout"]})) != []


def test_an_env_that_fails_sometimes_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        assert check_run(config(env_config={"how": "raise", "marker": str(tmp_path / "once")})) == []
    assert "failed in 1 of 2 episodes: step_error: RuntimeError: broken" in caplog.text


def test_train_refuses_such_an_env_before_it_starts_anything(tmp_path: Path):
    tag = f"{{env_type: '{HERE}BadEnv', env_config: {{how: raise}}}}"
    tags = ["train_env_manager.tags=[Bad]", "val_env_manager.tags=[Bad]", "warm_start=null", "~custom_envs.FrozenLake"]
    done = CliRunner().invoke(
        app, ["train", str(QUICKSTART), f"+custom_envs.Bad={tag}", *tags, f"output_dir={tmp_path}/r"]
    )
    assert done.exit_code == 2
    assert "can't be stepped: RuntimeError: broken" in done.output
    assert not (tmp_path / "r").exists()
