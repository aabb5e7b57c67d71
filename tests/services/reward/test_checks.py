from pathlib import Path

import pytest

from offbeat.envs.sandbox import platform_isolation
from offbeat.services.reward.checks import find_problems
from offbeat.services.reward.config import RewardsConfig


def test_what_can_not_be_built_is_found_before_the_start(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    functions = "tests.services.reward.functions"
    judge = {"kind": "llm_judge", "model_args": {"model_name_or_path": str(tmp_path)}}
    entries = [
        {"name": "a", "kind": "math_rule"},
        {"name": "b", "kind": "function", "path": f"{functions}:missing"},
        {"name": "c", "kind": "function", "path": f"{functions}:length"},
        {"name": "d", "kind": "http", "url": "http://x", "api_key_env": "NO_SUCH_TOKEN"},
        {"name": "e", "kind": "reward_model", "model_args": {"model_name_or_path": str(tmp_path / "no")}},
        {"name": "f", "kind": "reward_model", "model_args": {"model_name_or_path": str(tmp_path)}},
        {"name": "g", "kind": "code_sandbox"},
        {"name": "h", "kind": "llm_judge", "model_args": {"model_name_or_path": str(tmp_path / "no")}},
        {"name": "i", **judge, "strategy_args": {"strategy_config": {"max_seqs": 3}}},
        {"name": "j", **judge, "strategy_args": {"strategy_config": {"max_num_seqs": 3}}},
    ]
    problems = dict(find_problems(RewardsConfig.model_validate({"rewards": entries}, strict=False)))
    model = "model_args.model_name_or_path"
    assert list(problems) == ["1", "3", f"4.{model}", f"7.{model}", "8.strategy_args.strategy_config.max_seqs", "9"]
    assert "missing" in problems["1"]
    assert "NO_SUCH_TOKEN is not set" in problems["3"]
    assert "no model in" in problems[f"4.{model}"]
    assert "no model in" in problems[f"7.{model}"]
    assert "no tokenizer in" in problems["9"]


def test_a_sandbox_that_does_not_start_is_a_problem(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offbeat.envs.sandbox.run.SUPERVISOR_CODE", "raise BlockingIOError(11, 'no process')")
    platform_isolation.cache_clear()
    rewards = [{"name": "a", "kind": "math_rule"}, {"name": "b", "kind": "code_sandbox"}]
    ((place, problem),) = find_problems(RewardsConfig.model_validate({"rewards": rewards}, strict=False))
    assert place == "1"
    assert "ended without a result" in problem
