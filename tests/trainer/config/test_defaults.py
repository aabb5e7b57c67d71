"""Defaults that follow from other keys."""

import json
from typing import Any

import pytest

from offbeat.deploy.config.loader import dump_yaml, validate_tree
from offbeat.deploy.config.run import RunConfig

ENVS: dict[str, Any] = {"custom_envs": {"L": {"env_type": "frozen_lake"}}}
LORA = {"model_args": {"lora_target": "q_proj"}}


def resolved(**tree: Any) -> RunConfig:
    return validate_tree(ENVS | tree)


@pytest.mark.parametrize(
    ("tree", "rate"),
    [
        ({}, 1e-3),
        ({"actor_train": LORA}, 1e-2),
        ({"pretrain": "/a/model"}, 1e-6),
        ({"pretrain": "/a/model", "actor_train": {"num_threads": 2}}, 1e-6),
        ({"pretrain": "/a/model", "actor_train": LORA}, 1e-5),
        ({"actor_train": LORA | {"training_args": {"learning_rate": 3e-4}}}, 3e-4),
        ({"actor_train": {"training_args": {"learning_rate": 1e-6}}}, 1e-6),
    ],
)
def test_the_learning_rate_follows_model_and_method(tree: dict[str, Any], rate: float):
    config = resolved(**tree)
    assert config.actor_train.training_args.learning_rate == pytest.approx(rate)
    assert config.settings.learning_rate == config.actor_train.training_args.learning_rate


@pytest.mark.parametrize(
    ("learner", "engine", "dtype"),
    [
        ({}, {}, "float32"),
        ({"model_args": {"dtype": "bfloat16"}}, {}, "bfloat16"),
        ({"model_args": {"dtype": "bfloat16"}}, {"num_replicas": 2}, "bfloat16"),
        ({"model_args": {"dtype": "bfloat16"}}, {"model_args": {"dtype": "float32"}}, "float32"),
    ],
)
def test_the_engines_type_follows_the_learners(learner: dict[str, Any], engine: dict[str, Any], dtype: str):
    assert resolved(actor_train=learner, actor_infer=engine).actor_infer.model_args.dtype == dtype


def test_resolved_defaults_are_printed_and_read_back():
    config = resolved(actor_train=LORA | {"num_threads": 2})
    assert "learning_rate: 0.01" in dump_yaml(config)
    assert RunConfig.model_validate_json(json.dumps(config.model_dump(mode="json"))) == config


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        ({}, 512),
        ({"actor_infer": {"generating_args": {"temperature": 0.9}}}, 512),
        ({"actor_infer": {"generating_args": {"max_new_tokens": 100}}}, 100),
        ({"train_env_manager": {"generating_args": {"max_new_tokens": 80}}}, 80),
    ],
)
def test_answers_are_as_long_as_the_tags_say(sampling: dict[str, Any], tokens: int):
    """Only a limit of the sampling that is set cuts them."""
    envs = {
        "custom_envs": {"L": {"env_type": "frozen_lake", "max_tokens_per_step": 512}, "S": ENVS["custom_envs"]["L"]}
    }
    config = resolved(**envs, **sampling, sequence_length=2048)
    args = config.actor_infer.generating_args
    assert args.max_new_tokens == tokens
    assert config.val_env_manager.generating_args.for_evaluation(args).max_new_tokens == tokens
    assert resolved().actor_infer.generating_args.max_new_tokens == 64


def test_a_run_of_an_earlier_build_keeps_its_answers_length():
    """Its saved configuration has the default of then, which cut answers."""
    tree = resolved(sequence_length=2048).model_dump(mode="json")
    tree["custom_envs"]["L"]["max_tokens_per_step"] = 512
    assert validate_tree(tree).actor_infer.generating_args.max_new_tokens == 64
