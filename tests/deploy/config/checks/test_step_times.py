"""Limits of programs and tools that exceed a step's are found before the start."""

import json
from typing import Any

import pytest

from offbeat.deploy.config.checks.run import check_run
from offbeat.deploy.config.checks.step_times import check_step_times
from offbeat.deploy.config.run import RunConfig

CODE = {"env_type": "code", "env_config": {"dataset_name": "tasks.jsonl"}}
MCP = {"tool_id": "mcp", "url": "http://127.0.0.1:9/mcp"}


def tag(*tools: dict[str, Any], **inner: Any) -> dict[str, Any]:
    return {"env_type": "tools", "env_config": {"env_type": "frozen_lake", **inner, "tools": list(tools)}}


def config(env: dict[str, Any], **rules: Any) -> RunConfig:
    return RunConfig.model_validate_json(json.dumps({"custom_envs": {"T": {**env, **rules}}}))


@pytest.mark.parametrize(
    "env",
    [
        CODE,
        {**CODE, "env_config": {"dataset_name": "tasks.jsonl", "sandbox": {"timeout_s": 25}}},
        tag(MCP),
        tag({"tool_id": "python_code"}),
        tag(MCP, **CODE),
        {"env_type": "frozen_lake"},
    ],
    ids=["code", "slow tests", "mcp", "python", "tools around code", "frozen_lake"],
)
def test_defaults_fit_the_step(env: dict[str, Any]) -> None:
    assert list(check_step_times(config(env))) == []


SLOW = {"dataset_name": "tasks.jsonl", "max_total_s": 60}


@pytest.mark.parametrize(
    ("env", "longest_s", "keys"),
    [
        ({"env_type": "code", "env_config": SLOW}, 60, "env_config.max_total_s and env_config.sandbox.timeout_s"),
        (
            {"env_type": "code", "env_config": {**SLOW, "max_tests": 2, "sandbox": {"timeout_s": 16}}},
            32,
            "env_config.max_total_s and env_config.sandbox.timeout_s",
        ),
        (tag({**MCP, "timeout_s": 60}), 68, "env_config.calls_timeout_s"),
        (tag({"tool_id": "python_code", "limits": {"timeout_s": 50}}), 50, "env_config.calls_timeout_s"),
        (
            {**tag(MCP), "env_config": {**tag(MCP)["env_config"], "calls_timeout_s": 40}},
            48,
            "env_config.calls_timeout_s",
        ),
        (
            tag(MCP, env_type="code", env_config=SLOW),
            60,
            "env_config.env_config.max_total_s and env_config.env_config.san",
        ),
    ],
)
def test_a_step_that_may_take_longer_than_its_timeout_is_found(env: dict[str, Any], longest_s: int, keys: str) -> None:
    [issue] = check_step_times(config(env))
    assert issue.path == "custom_envs.T.step_timeout_s"
    assert f"take more than {longest_s}, or less in {keys}" in issue.message
    assert list(check_step_times(config(env, step_timeout_s=longest_s + 1))) == []


def test_only_a_run_that_is_started_anew_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    slow = config(tag({"tool_id": "python_code", "limits": {"timeout_s": 50}}))
    resumed = slow.model_copy(update={"resume_from_checkpoint": True})
    runs = [(slow, False), (slow, True), (resumed, False)]
    paths = [[issue.path for issue in check_run(run, trial=False, started=started)] for run, started in runs]
    assert ["custom_envs.T.step_timeout_s" in each for each in paths] == [True, False, False]
    assert caplog.text.count("(accepted, because the run was started with it)") == 2
