"""A saved configuration leaves out what its other keys imply, so that an override of those counts."""

import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import canonical_tree, dump_yaml, read_run, show_yaml, validate_tree
from offbeat.deploy.config.saving import to_saved_tree
from offbeat.deploy.run_setup import run_spec
from offbeat.services.control.console.derived_runs import fork_config
from offbeat.services.control.run import RunRecord
from offbeat.trainer.config.aliases import canonical_json
from offbeat.trainer.config.run import LearnerRunConfig

LAKE = {"env_type": "frozen_lake", "max_tokens_per_step": 96}
BASE: dict[str, Any] = {"exp_name": "lake", "custom_envs": {"F": LAKE}, "rollout_batch_size": 64}
SIZES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
SFT = {"pipeline": "sft", "data": {"dataset_name": "/rows.jsonl"}}
GPUS = {"actor_train": {"device": "cuda", "device_mapping": [0, 1]}}
TEACHER = {"model_args": {"model_name_or_path": "tiny"}}
CASES: list[tuple[dict[str, Any], dict[str, Any], str, object]] = [
    ({}, {"custom_envs.F.max_tokens_per_step": 512}, "actor_infer.generating_args.max_new_tokens", 512),
    (
        {"actor_infer": {"device_mapping": [0, 1, 2, 3]}},
        {"actor_infer.device_mapping": [0, 1]},
        "actor_infer.num_replicas",
        2,
    ),
    (
        {"actor_train": {"device_mapping": [0, 1, 2, 3]}},
        {"actor_train.device_mapping": [0, 1]},
        "actor_train.num_processes",
        2,
    ),
    (
        {"critic": {"device_mapping": [2, 3]}, "adv_estimator": "gae"},
        {"critic.device_mapping": [2]},
        "critic.num_processes",
        1,
    ),
    (
        {"actor_train": {"training_args": SIZES}},
        {"sequence_length": 512},
        "actor_train.training_args.max_tokens_per_microbatch",
        1024,
    ),
    (
        {"actor_train": {"training_args": SIZES}},
        {"rollout_batch_size": 128},
        "actor_train.training_args.num_minibatches",
        16,
    ),
    ({}, {"actor_train.model_args.dtype": "bfloat16"}, "actor_infer.model_args.dtype", "bfloat16"),
    (SFT, {"rollout_batch_size": 256}, "train_env_manager.num_env_groups", 512),
    (
        GPUS | {"use_kl_loss": True, "reference": {"device_mapping": [2, 3]}},
        {"reference.device_mapping": [2]},
        "reference.strategy_args.num_replicas",
        1,
    ),
    (
        GPUS | {"adv_estimator": "opd", "teacher": {"big": TEACHER | {"device_mapping": [2, 3]}}},
        {"teacher.big.device_mapping": [2]},
        "teacher.big.strategy_args.num_replicas",
        1,
    ),
]


def value_of(config: LearnerRunConfig, path: str) -> object:
    value: object = config
    for name in path.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


@pytest.mark.parametrize(("keys", "changes", "path", "expected"), CASES)
def test_an_override_of_a_saved_configuration_changes_what_it_implies(
    keys: dict[str, Any], changes: dict[str, Any], path: str, expected: object, tmp_path: Path
):
    """As `offbeat train runs/lake/config.yaml resume_from_checkpoint=true KEY=VALUE`."""
    config = validate_tree(canonical_tree(BASE | keys))
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert read_run(tmp_path / "config.yaml") == config
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    assert value_of(read_run(tmp_path / "config.yaml", overrides), path) == expected
    assert f"{path.rpartition('.')[2]}: {value_of(config, path)}" in show_yaml(config)


@pytest.mark.parametrize(("keys", "changes", "path", "expected"), CASES)
def test_a_change_of_a_fork_changes_what_it_implies(
    keys: dict[str, Any], changes: dict[str, Any], path: str, expected: object
):
    config = validate_tree(canonical_tree(BASE | keys))
    spec = run_spec(config)
    assert LearnerRunConfig.model_validate_json(
        canonical_json(spec.config), extra="ignore"
    ) == LearnerRunConfig.model_validate({name: getattr(config, name) for name in LearnerRunConfig.model_fields})
    record = RunRecord("lake", spec.config, "/runs/lake", spec.max_steps, spec.settings)
    fork = validate_tree(canonical_tree(fork_config(json.loads(record.config), record, 2, "/c", changes)))
    assert value_of(fork, path) == expected


def test_the_managers_sampling_is_saved_alone_and_overridden_there(tmp_path: Path):
    config = validate_tree(
        BASE | {"train_env_manager": {"generating_args": {"temperature": 0.6, "max_new_tokens": 96}}}
    )
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert read_run(tmp_path / "config.yaml") == config
    changed = read_run(tmp_path / "config.yaml", ["train_env_manager.generating_args.temperature=1.3"])
    assert changed.temperature == 1.3
    with pytest.raises(ConfigError, match=r"temperature: 1\.3 disagrees with .*, 0\.6, .* took the manager's"):
        read_run(tmp_path / "config.yaml", ["actor_infer.generating_args.temperature=1.3"])


def test_values_that_were_set_are_saved():
    limit = {"generating_args": {"max_new_tokens": 32}, "num_replicas": 2}
    tree = to_saved_tree(validate_tree(BASE | {"actor_infer": limit, "actor_train": {"num_processes": 2}}))
    assert tree["actor_infer"]["generating_args"]["max_new_tokens"] == 32
    assert (tree["actor_infer"]["num_replicas"], tree["actor_train"]["num_processes"]) == (2, 2)


def test_devices_of_a_reward_change_its_replicas(tmp_path: Path):
    judge = {"name": "judge", "kind": "llm_judge", "device": "cuda", "device_mapping": [2, 3]}
    judge["model_args"] = {"model_name_or_path": "/judge"}
    prompts = {"pipeline": "rlvr", "data": SFT["data"], "custom_envs": {"F": {"env_type": "prompt"}}}
    config = validate_tree(BASE | prompts | {"rewards": [judge]})
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert read_run(tmp_path / "config.yaml") == config
    changed = read_run(tmp_path / "config.yaml", ["rewards.0.device_mapping=[2]"])
    assert (config.rewards[0].num_replicas, changed.rewards[0].num_replicas) == (2, 1)


def test_the_length_of_sampled_rows_is_saved_beside_an_evaluated_tags_limit():
    distill = SFT | {"pipeline": "distill", "distill": {"lmbda": 0.5}, "teacher": {"big": TEACHER}}
    limit = {"actor_infer": {"generating_args": {"max_new_tokens": 96}}}
    tree = to_saved_tree(validate_tree(BASE | distill | limit))
    assert tree["actor_infer"]["generating_args"]["max_new_tokens"] == 96
