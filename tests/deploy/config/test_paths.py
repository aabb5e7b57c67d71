from pathlib import Path
from typing import Any

import pytest

from offbeat.deploy.config.loader import read_document, read_run
from offbeat.deploy.config.paths import resolve_paths


def test_relative_paths_of_a_tree_are_made_absolute():
    """Other values are left to validation."""
    path = "model_args"
    tree = {
        "teacher": {
            "a": {path: {"model_name_or_path": "./models/a"}},
            "b": {path: {"model_name_or_path": "/b"}},
            "c": 3,
        },
        "pretrain": "tiny",
        "reference": {path: {"model_name_or_path": "ref"}},
        "resume_from_checkpoint": True,
    }
    resolved = resolve_paths(tree, Path("/here"))
    assert resolved == {
        "teacher": {
            "a": {path: {"model_name_or_path": "/here/models/a"}},
            "b": {path: {"model_name_or_path": "/b"}},
            "c": 3,
        },
        "pretrain": "tiny",
        "reference": {path: {"model_name_or_path": "/here/ref"}},
        "resume_from_checkpoint": True,
        "output_dir": "/here/runs/offbeat",
    }
    assert resolve_paths({"output_dir": 5, "teacher": [1]}, Path("/here")) == {"output_dir": 5, "teacher": [1]}


@pytest.mark.parametrize(
    ("env", "resolved"),
    [
        (
            {
                "env_type": "math",
                "env_config": {"dataset_name": "train.jsonl", "val_dataset_name": None, "split": "any"},
            },
            {"dataset_name": "/here/train.jsonl", "val_dataset_name": None, "split": "any"},
        ),
        (
            {"env_type": "harbor", "env_config": {"tasks_dir": "tasks", "val_tasks_dir": "/val", "tasks": ["log-*"]}},
            {"tasks_dir": "/here/tasks", "val_tasks_dir": "/val", "tasks": ["log-*"]},
        ),
        (
            {
                "env_type": "tools",
                "env_config": {
                    "env_type": "qa",
                    "env_config": {"dataset_name": "data/qa.csv"},
                    "tools": [{"tool_id": "python_code"}, {"tool_id": "search", "corpus": "c.txt"}],
                },
            },
            {
                "env_type": "qa",
                "env_config": {"dataset_name": "/here/data/qa.csv"},
                "tools": [{"tool_id": "python_code"}, {"tool_id": "search", "corpus": "/here/c.txt"}],
            },
        ),
        ({"env_type": "own:Env", "env_config": {"dataset_name": "gsm8k"}}, {"dataset_name": "gsm8k"}),
        ({"env_type": ["math"], "env_config": 3}, 3),
    ],
)
def test_relative_paths_of_built_in_envs_are_made_absolute(env: dict[str, Any], resolved: object):
    tree = resolve_paths({"custom_envs": {"T": env}}, Path("/here"))
    assert tree["custom_envs"]["T"]["env_config"] == resolved


@pytest.mark.parametrize(("python", "resolved"), [("venv/bin/python", "/here/venv/bin/python"), ("python3", "python3")])
def test_only_paths_of_programs_are_made_absolute(python: str, resolved: str):
    tree = resolve_paths({"custom_envs": {"T": {"agent_runner": {"python": python}}}}, Path("/here"))
    assert tree["custom_envs"]["T"]["agent_runner"]["python"] == resolved


def test_a_folder_of_weights_is_the_same_for_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As replicas of other nodes have other working folders."""
    monkeypatch.chdir(tmp_path)
    tree = {"custom_envs": {"A": {"env_type": "frozen_lake"}}, "weights": {"transport": "fs", "url": "runs/w"}}
    assert read_document(tree, working_dir=Path("/here")).weights.url == "/here/runs/w"
    assert read_document(tree).weights.url == str(tmp_path / "runs/w")
    tree["weights"]["url"] = "s3://bucket/w"
    assert read_document(tree, working_dir=Path("/here")).weights.url == "s3://bucket/w"


def test_a_tilde_is_the_home_folder_in_paths_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "x.yaml"
    file.write_text(
        "output_dir: ~/runs/x\nredis: {server: ~/redis-server}\npretrain: ~/models/m\nlogging_dir: a/~/b\ncustom_envs:\n"
        "  A: {env_type: math, env_instruction: ~/x, env_config: {dataset_name: ~/d.jsonl, question_key: ~/q}}\n"
    )
    for config in (read_run(file), read_run(file, ["seed=2"]), read_document(file.read_text(), working_dir=tmp_path)):
        env = config.custom_envs["A"]
        assert (config.output_dir, config.pretrain) == (tmp_path / "runs/x", str(tmp_path / "models/m"))
        assert config.logging_dir is not None
        assert config.logging_dir.parts[-3:] == ("a", "~", "b")
        assert env.env_instruction == "~/x"
        assert config.redis.server == tmp_path / "redis-server"
        assert env.env_config == {"dataset_name": str(tmp_path / "d.jsonl"), "question_key": "~/q"}
