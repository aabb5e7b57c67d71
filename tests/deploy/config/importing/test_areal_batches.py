"""Evaluations of AReaL sample by `eval_gconfig` with its own defaults, or by `gconfig` without one."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.deploy.config.importing.areal import import_areal
from offbeat.deploy.config.importing.rules import get

EVALUATION = "val_env_manager.generating_args"
TRAINING = "actor_infer.generating_args.max_new_tokens"
STEP = "custom_envs.prompt.max_tokens_per_step"


@pytest.mark.parametrize(
    ("evaluation", "expected"),
    [
        ("", {"val_env_manager.group_size": 4, EVALUATION: {"temperature": 0.7, "top_p": 0.9, "top_k": 20}}),
        ("eval_gconfig: {max_new_tokens: 512}", {"val_env_manager.group_size": 1, EVALUATION: {"max_new_tokens": 512}}),
        ("eval_gconfig: {temperature: 0.6}", {"val_env_manager.group_size": 1, EVALUATION: {"temperature": 0.6}}),
    ],
)
def test_evaluations_have_gconfigs_sampling_without_their_own(
    evaluation: str, expected: dict[str, Any], tmp_path: Path
):
    tree = convert(tmp_path, evaluation)
    assert {key: get(tree, key) for key in expected} == expected


def test_longer_answers_of_evaluations_have_room(tmp_path: Path):
    tree = convert(tmp_path, "eval_gconfig: {max_new_tokens: 2048}")
    expected: dict[str, Any] = {
        "sequence_length": 3072,
        TRAINING: 512,
        f"{EVALUATION}.max_new_tokens": 2048,
        STEP: 2048,
        "data.prompt_length": 1024,
    }
    assert {key: get(tree, key) for key in expected} == expected


def test_answers_of_evaluations_are_within_their_own_limit(tmp_path: Path):
    tree = convert(tmp_path, "eval_gconfig: {max_new_tokens: 2048, max_tokens: 2048}")
    expected = {"sequence_length": 2048, TRAINING: 512, f"{EVALUATION}.max_new_tokens": 2047, STEP: 2047}
    assert {key: get(tree, key) for key in expected} == expected


def test_a_run_without_evaluations_needs_no_room_for_them(tmp_path: Path):
    tree = convert(tmp_path, "eval_gconfig: {max_new_tokens: 2048}", rows="")
    assert (tree["sequence_length"], get(tree, STEP)) == (1536, 512)


def convert(folder: Path, evaluation: str, rows: str = "valid_dataset: {path: b.jsonl}") -> dict[str, Any]:
    path = folder / "config.yaml"
    path.write_text(
        "actor: {path: org/model}\ntrain_dataset: {path: a.jsonl, batch_size: 8, type: rl, max_length: 1024}\n"
        "gconfig: {n_samples: 4, max_new_tokens: 512, temperature: 0.7, top_p: 0.9, top_k: 20}\n"
        f"evaluator: {{freq_steps: 10}}\n{rows}\n{evaluation}\n"
    )
    return import_areal(path).tree
