"""The schema that editors read accepts our configurations and refuses mistakes in them."""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator
from typer.testing import CliRunner

from offbeat.deploy.cli.app import app
from offbeat.deploy.config.errors import all_keys
from offbeat.deploy.config.loader import CONFIGS
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.schema import FILE, run_schema_text
from offbeat.deploy.config.yaml_limits import load_yaml

MODELINE = "# yaml-language-server: $schema="
FILES = sorted(CONFIGS.rglob("*.yaml"))


@pytest.fixture(scope="module")
def schema() -> Draft7Validator:
    tree = json.loads(run_schema_text())
    Draft7Validator.check_schema(tree)
    return Draft7Validator(tree)


def problems(schema: Draft7Validator, tree: Any) -> list[str]:
    return [error.message for error in schema.iter_errors(tree)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_a_packaged_configuration_validates_and_names_the_schema(file: Path, schema: Draft7Validator):
    text = file.read_text()
    assert problems(schema, load_yaml(text)) == []
    first = text.partition("\n")[0]
    assert first.startswith(MODELINE)
    assert (file.parent / first.removeprefix(MODELINE)).resolve() == (CONFIGS / FILE).resolve()


def test_the_stored_schema_is_that_of_the_code():
    assert (CONFIGS / FILE).read_text() == run_schema_text(), "run `make docs`"


def test_the_command_prints_it():
    result = CliRunner().invoke(app, ["config", "schema"])
    assert (result.exit_code, result.output) == (0, run_schema_text())


@pytest.mark.parametrize(
    "text",
    [
        "max_stepz: 3",
        "max_steps: 0",
        "max_steps: many",
        "max_steps: [1]",
        "adv_estimator: grpoo",
        "actor_train: {training_args: {learning_rate: -1}}",
        "actor_train: {training_args: {learningrate: 1}}",
        "actor_infer: {generating_args: {top_p: 1.5}}",
        "custom_envs: {A: {env_type: frozen_lake, max_steps: 0}}",
        "custom_envs: {A: {env_typ: frozen_lake}}",
        "dpo: {loss_type: best}",
        "train_env_manager: {tags: A}",
        "exp_name: 'a b'",
        "whiten_advantages: 3",
        "actor_train: {model_args: {dtype: int8}}",
        "actor_infer: {generating_args: {num_beams: 2}}",
    ],
)
def test_a_mistake_is_refused(text: str, schema: Draft7Validator):
    assert problems(schema, load_yaml(text))


@pytest.mark.parametrize(
    "text",
    [
        "defaults: ['../config/traj_envs@_here_', _self_]",
        "max_steps: ${steps}",
        "custom_envs: {A: '${custom_env.A}'}",
        "async_generation_ratio: 1",
        "max_grad_norm: 0.5",
        "actor_infer: {tensor_parallel_size: 2, strategy_args: {strategy_config: {tp_size: 2, block_size: 16}}}",
        "actor_train: {model_args: {dtype: bf16, attn_implementation: fa2, model_type: ~}}",
        "actor_train: {device_mapping: 'list(range(0,8))', data_args: {template: native}}",
        "actor_infer: {generating_args: {num_beams: 1}}",
        "{track_with: wandb, tracker_kwargs: {project: agents}}",
        "teacher: {a: {pretrain: /models/a}}",
        "train_env_manager: {env_groups: 8, max_env_num_per_worker: 0}",
        "custom_envs: {A: {env_type: sokoban, env_config: {dim_room: [6, 6]}, agent_runner_cls: ~}}",
        "chat_template: ~",
    ],
)
def test_what_a_run_accepts_is_accepted(text: str, schema: Draft7Validator):
    assert problems(schema, load_yaml(text)) == []


def test_every_key_has_its_docs_or_a_name_that_says_it():
    tree = json.loads(run_schema_text())
    described = [name for name, each in tree["properties"].items() if each.get("description") or "$ref" in str(each)]
    assert {key[0] for key in all_keys(RunConfig)} <= set(tree["properties"])
    assert len(described) > 0.9 * len(tree["properties"])
    learning_rate = tree["definitions"]["TrainingArgs"]["properties"]["learning_rate"]
    assert "Peak learning rate" in learning_rate["description"]
    assert {"type": "number", "minimum": 0} in learning_rate["anyOf"]
