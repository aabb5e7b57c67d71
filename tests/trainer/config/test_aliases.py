"""Other spellings of keys and values."""

import json
from typing import Any

import pytest

from offbeat.deploy.config.errors import ConfigError, all_keys, nearest_keys
from offbeat.deploy.config.loader import canonical_tree, load_run, validate_tree
from offbeat.deploy.config.run import RunConfig
from offbeat.services.reward.kinds.model_config import LlmJudgeConfig, RewardModelConfig
from offbeat.trainer.config.aliases import (
    ENGINE,
    KEYS,
    REWARD,
    ROLES,
    UNUSED_PARTS,
    VALUES,
    canonical_json,
    canonicalize,
    find_aliases,
)
from tests.paths import QUICKSTART, ROOT

ENVS: dict[str, Any] = {"custom_envs": {"a": {"env_type": "frozen_lake"}}}


def leaf(tree: dict[str, Any], path: str) -> Any:
    for part in path.split("."):
        tree = tree[part]
    return tree


def nested(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize(("key", "canonical"), KEYS.items(), ids=KEYS)
def test_another_spelling_becomes_the_canonical_key(key: str, canonical: str):
    key, canonical = key.replace("*", "name"), canonical.replace("*", "name")
    value = {"seed": 1} if canonical == ENGINE else 2
    tree, issues = canonicalize(nested(key, value))
    assert issues == []
    assert leaf(tree, canonical) == value
    with pytest.raises(KeyError):
        leaf(tree, key)


@pytest.mark.parametrize(("key", "values"), VALUES.items(), ids=VALUES)
def test_another_spelling_of_a_value_becomes_the_canonical_one(key: str, values: dict[str, str]):
    key = key.replace("*", "name")
    for value, canonical in values.items():
        tree, _ = canonicalize(nested(key, value))
        assert leaf(tree, key) == canonical


@pytest.mark.parametrize("canonical", sorted(set(KEYS.values()) | set(VALUES)))
def test_canonical_keys_exist(canonical: str):
    if canonical.startswith(REWARD):  # a list's entries have the keys of their kind
        keys = {".".join(key) for kind in (RewardModelConfig, LlmJudgeConfig) for key in all_keys(kind)}
        assert canonical.removeprefix(f"{REWARD}.") in keys
    else:
        assert canonical.replace("*", "a") in nearest_keys(canonical.replace("*", "a"), RunConfig)


SERVICE = {"placement": "service", "num_replicas": 2}


@pytest.mark.parametrize(
    ("train", "mapping", "strategy", "expected"),
    [
        ([0, 1], [2, 3], {}, SERVICE),
        (
            "list(range(0, 2))",
            "list(range(2, 4))",
            {"strategy_name": "hf_infer"},
            {"strategy_name": "hf_infer", **SERVICE},
        ),
        (None, [2, 3], {}, SERVICE),
        ([0, 1], [2, 3], {"num_replicas": 1}, {"placement": "service", "num_replicas": 1}),
        ([0, 1], [2, 3], {"placement": "learner"}, {"placement": "learner"}),
        ([0, 1], [2, 3], {"strategy_name": "deepspeed_infer"}, {"strategy_name": "deepspeed_infer"}),
        ([0, 1], "list(range(0, 2))", {}, {}),
        ([0, 1], None, {}, {}),
        ([0, 1], "range(", {}, {}),
    ],
)
def test_devices_of_its_own_make_a_service_of_a_frozen_model(
    train: object, mapping: object, strategy: dict[str, Any], expected: dict[str, Any]
):
    for role in ({"reference": {}}, {"teacher": {"t": {}}}):
        tree = {"actor_train": {"device_mapping": train}, **role}
        table = tree.get("reference", tree.get("teacher", {}).get("t"))
        table |= {"device_mapping": mapping, "strategy_args": dict(strategy)}
        for canonical in (canonicalize(tree)[0], canonicalize(canonicalize(tree)[0])[0]):
            assert canonical.get("reference", canonical.get("teacher", {}).get("t"))["strategy_args"] == expected


def test_a_key_in_two_spellings_is_refused_unless_they_agree():
    tree = {"async_generation_ratio": 1, "max_staleness": 2}
    _, (issue,) = canonicalize(tree)
    assert (issue.path, "max_staleness alone" in issue.message) == ("async_generation_ratio", True)
    assert canonicalize({"async_generation_ratio": 1, "max_staleness": 1}) == ({"max_staleness": 1}, [])
    assert tree == {"async_generation_ratio": 1, "max_staleness": 2}


def test_engine_arguments_of_both_spellings_are_merged():
    tree, issues = canonicalize({"actor_infer": {"engine_kwargs": {"swap_space": 0}, "max_num_seqs": 8}})
    assert (issues, leaf(tree, ENGINE)) == ([], {"swap_space": 0, "max_num_seqs": 8})
    _, (issue,) = canonicalize(
        {"actor_infer": {"engine_kwargs": {"a": 1}, "strategy_args": {"strategy_config": {"a": 2}}}}
    )
    assert issue.path == "actor_infer.engine_kwargs"


def test_values_that_change_nothing_are_dropped_and_others_refused_with_the_reason():
    args = {"disable_gradient_checkpointing": True, "model_type": None, "dtype": "bf16"}
    tree, issues = canonicalize({"actor_infer": {"model_args": args}})
    assert (tree, issues) == ({"actor_infer": {"model_args": {"dtype": "bfloat16"}}}, [])
    _, (issue,) = canonicalize({"actor_infer": {"model_args": {"disable_gradient_checkpointing": False}}})
    assert "no backward pass" in issue.message


def test_anything_else_is_left_to_validation():
    for tree in ({"actor_infer": 3}, {"teacher": [1]}, {"critic": None}, {"actor_infer": {"dtype": ["x"]}}):
        assert canonicalize(tree)[1] == []


def test_a_stored_configuration_of_an_earlier_build_is_read():
    stored = {
        **ENVS,
        "actor_infer": {"dtype": "auto", "max_num_seqs": 4, "engine_kwargs": {}},
        "critic": {"learning_rate": 1e-3},
    }
    config = RunConfig.model_validate_json(canonical_json(json.dumps(stored)))
    assert (config.actor_infer.engine.max_num_seqs, config.critic.training_args.learning_rate) == (4, 1e-3)
    assert config.actor_infer.model_args.dtype == config.actor_train.model_args.dtype


def test_a_spelling_at_the_wrong_place_is_answered_with_the_right_key():
    tree = {**ENVS, "n_groups": 4}
    assert canonicalize(tree) == (tree, [])
    assert find_aliases("tp_size") == (f"{ENGINE}.tensor_parallel_size",)
    managers = ("train_env_manager", "val_env_manager")
    assert find_aliases("n_groups") == tuple(f"{manager}.num_groups_partition" for manager in managers)
    assert find_aliases("actor_train.learning_rate") == (), (
        "a right name in a wrong table: the nearest key, not the critic's"
    )


PARTS = ("model_args", "training_args", "generating_args", "strategy_args", "device_mapping")


@pytest.mark.parametrize("role", ROLES)
def test_a_role_has_each_part_or_a_reason(role: str):
    keys = {".".join(key) for key in all_keys(RunConfig)}
    assert [part for part in PARTS if (f"{role}.{part}" in keys) == (f"{role}.{part}" in UNUSED_PARTS)] == []


def test_a_part_without_a_use_is_refused_with_the_reason():
    values = ["+reference.training_args.learning_rate=1.0", "+actor_infer.infer_batch_size=4"]
    values += ["+actor_infer.model_args.lora_rank=8"]
    values += ["+teacher.big={model_args: {model_name_or_path: big}, generating_args: {temperature: 1.0}}"]
    with pytest.raises(ConfigError) as refused:
        load_run(QUICKSTART, values)
    found = {issue.path: issue.message for issue in refused.value.issues}
    assert "(a frozen model is not trained)" in found["reference.training_args"]
    assert "max_num_seqs" in found["actor_infer.infer_batch_size"]
    assert "actor_train.model_args.lora_*" in found["actor_infer.model_args.lora_rank"]
    assert "only engines sample" in found["teacher.big.generating_args"]


MODEL = {"model_name_or_path": "scores"}


@pytest.mark.parametrize(
    ("reward", "part", "says"),
    [
        ({"kind": "math_rule"}, "model_args", "only the kinds reward_model and llm_judge have a model"),
        ({"kind": "math_rule"}, "device_mapping", "compute on devices"),
        ({"kind": "http", "url": "http://x"}, "strategy_args", "have an engine"),
        ({"kind": "reward_model", "model_args": MODEL}, "generating_args", "only the kind llm_judge writes text"),
        ({"kind": "reward_model", "model_args": MODEL}, "training_args", "trains its policy"),
        ({"kind": "reward_model", "model_args": MODEL}, "infer_batch_size", "max_batch_tokens"),
        ({"kind": "reward_model", "model_args": MODEL}, "strategy_args.strategy_config", "no engine arguments"),
        ({"kind": "llm_judge", "model_args": MODEL}, "model_args.attn_implementation", "the judge's engine chooses"),
        ({"kind": "llm_judge", "model_args": MODEL}, "training_args", "trains its policy"),
    ],
)
def test_a_reward_has_the_parts_of_a_role_or_a_reason(reward: dict[str, Any], part: str, says: str):
    parent, _, leaf = part.rpartition(".")
    table = {**reward.get(parent, {}), leaf: {"a": 1}}
    given = {**reward, parent: table} if parent else {**reward, leaf: {"a": 1}}
    with pytest.raises(ConfigError) as refused:
        validate_tree({**ENVS, "pipeline": "rlvr", "rewards": [{"name": "r", **given}]})
    found = {issue.path: issue.message for issue in refused.value.issues}
    assert "this role has no use for it" in found[f"rewards.0.{part}"]
    assert says in found[f"rewards.0.{part}"]


def test_rewards_of_an_earlier_build_are_read_in_the_roles_form():
    rewards = [
        {"name": "a", "kind": "reward_model", "model_name_or_path": "scores", "dtype": "bf16"},
        {"name": "b", "kind": "llm_judge", "model_name_or_path": "judges", "strategy_config": {"tp_size": 2},
         "temperature": 0.5, "max_tokens": 9},
        {"name": "c", "kind": "function", "path": "a:b", "args": {"dtype": "bf16", "temperature": 1}},
    ]  # fmt: skip
    stored = {**ENVS, "pipeline": "rlvr", "rewards": rewards}
    scorer, judge, function = RunConfig.model_validate_json(canonical_json(json.dumps(stored))).rewards
    assert isinstance(scorer, RewardModelConfig)
    assert isinstance(judge, LlmJudgeConfig)
    assert (str(scorer.model_folder), scorer.model_args.dtype) == ("scores", "bfloat16")
    assert (str(judge.model_folder), judge.strategy_args.strategy_config.tensor_parallel_size) == ("judges", 2)
    assert (judge.generating_args.temperature, judge.generating_args.max_new_tokens) == (0.5, 9)
    assert function.model_dump()["args"] == {"dtype": "bf16", "temperature": 1}
    twice = {"name": "a", "kind": "reward_model", "dtype": "bf16", "model_args": {**MODEL, "dtype": "fp32"}}
    (issue,) = canonicalize({"rewards": [twice]})[1]
    assert issue.path == "rewards.0.dtype"
    assert "set rewards.0.model_args.dtype alone" in issue.message


@pytest.mark.parametrize("tree", [{"rewards": [{"model_args": [1], "dtype": "x"}]}, {"rewards": [[{"dtype": "x"}]]},
                                  {"actor_train": [1], "max_grad_norm": 1}])  # fmt: skip
def test_spellings_in_a_malformed_tree_raise_nothing(tree: dict[str, Any]):
    canonicalize(tree)


def test_the_training_managers_sampling_is_the_policys():
    keys = {"train_env_manager": {"generating_args": {"temperature": 0.7}}}
    config = RunConfig.model_validate_json(json.dumps(ENVS | keys | {"actor_infer": {"generating_args": {"top_k": 9}}}))
    assert (config.temperature, config.actor_infer.generating_args.top_k, config.settings.temperature) == (0.7, 9, 0.7)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    both = ENVS | keys | {"actor_infer": {"generating_args": {"temperature": 0.9}}}
    with pytest.raises(ValueError, match=r"temperature: 0\.9 disagrees with train_env_manager"):
        RunConfig.model_validate_json(json.dumps(both))


def test_arguments_of_a_single_tracker_need_no_name():
    arguments = {"log_dir": "/logs"}
    tree, _ = canonicalize({"track_with": "tensorboard", "tracker_kwargs": arguments})
    assert tree["tracker_kwargs"] == {"tensorboard": arguments}
    assert canonicalize(tree)[0] == tree


def test_every_spelling_is_documented():
    page = (ROOT / "docs" / "configuration.md").read_text()
    engine = {
        key for key in KEYS if key.startswith("actor_infer.") and KEYS[key].startswith(ENGINE) and ENGINE not in key
    }
    for key in set(KEYS) - engine:
        assert f"`{key.rpartition('.')[2]}`" in page or f"`{key.replace('*', 'NAME')}`" in page, key
    for values in VALUES.values():
        assert any(value in page for value in values) or "roll." in str(values)


def test_keys_of_rolls_examples_that_change_nothing_are_dropped():
    given = {
        "actor_train": {
            "data_args": {"template": "qwen2_5"},
            "training_args": {"warmup_ratio": 0},
            "use_remove_padding": True,
        },
        "actor_infer": {"data_args": {"template": "qwen2_5"}, "generating_args": {"num_beams": 1}},
        "reference": {"data_args": {"template": "qwen2_5"}, "model_args": {"ulysses_size": 1}},
    }
    tree, issues = canonicalize(given)
    assert not issues
    assert tree == {
        "chat_template": "qwen2_5",
        "actor_train": {"training_args": {}},
        "actor_infer": {"generating_args": {}},
        "reference": {"model_args": {}},
    }


def test_keys_of_rolls_examples_without_effect_are_refused_with_the_reason():
    _, issues = canonicalize({"batch_adjust_mode": "copy", "actor_infer": {"generating_args": {"num_beams": 4}}})
    assert {issue.path for issue in issues} == {"batch_adjust_mode", "actor_infer.generating_args.num_beams"}
    _, issues = canonicalize({"actor_train": {"data_args": {"template": "qwen3"}}, "chat_template": "chatml"})
    assert [issue.path for issue in issues] == ["actor_train.data_args.template"]


def test_megatrons_settings_become_ours():
    given = {"tensor_model_parallel_size": 1, "use_distributed_optimizer": True, "recompute_granularity": "full"}
    strategy = {"strategy_name": "deepspeed_train", "strategy_config": given}
    tree, issues = canonicalize({"actor_train": {"strategy_args": strategy}})
    assert not issues
    assert tree["actor_train"]["strategy_args"] == {
        "strategy_name": "deepspeed_train",
        "strategy_config": {},
        "zero_stage": 1,
        "tp_size": 1,
    }
    assert tree["actor_train"]["model_args"] == {"disable_gradient_checkpointing": False}
    for name in ("fsdp2_train", "megatron_train"):
        tree, issues = canonicalize({"actor_train": {"strategy_args": {**strategy, "strategy_name": name}}})
        assert (issues, "zero_stage" in tree["actor_train"]["strategy_args"]) == ([], False)


@pytest.mark.parametrize(
    ("train", "key"),
    [
        ({"strategy_config": {"context_parallel_size": 2}}, "context_parallel_size"),
        ({"strategy_config": {"recompute_granularity": "selective"}}, "recompute_granularity"),
        ({"strategy_config": {"use_distributed_optimizer": True}, "zero_stage": 0}, "use_distributed_optimizer"),
        (
            {"strategy_config": {"use_distributed_optimizer": False}, "strategy_name": "fsdp2_train"},
            "use_distributed_optimizer",
        ),
    ],
)
def test_megatrons_settings_that_contradict_ours_are_refused(train: dict[str, Any], key: str):
    _, (issue,) = canonicalize({"actor_train": {"strategy_args": train}})
    assert issue.path == f"actor_train.strategy_args.strategy_config.{key}"


def test_recomputation_in_both_spellings_must_agree():
    strategy = {"strategy_config": {"recompute_granularity": "full"}}
    args = {"disable_gradient_checkpointing": True}
    _, (issue,) = canonicalize({"actor_train": {"strategy_args": strategy, "model_args": args}})
    assert "disable_gradient_checkpointing" in issue.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor_infer.generating_args.num_return_sequences", 2),
        ("train_env_manager.generating_args.num_return_sequences", 4),
        ("actor_train.model_args.model_type", "diffusion_module"),
        ("rewards.*.model_args.model_type", "trl"),
        ("actor_train.strategy_args.strategy_config.expert_model_parallel_size", 2),
    ],
)
def test_a_value_of_roll_that_nothing_here_does_is_refused(key: str, value: object):
    _, (issue,) = canonicalize(nested(key, value))
    assert issue.path == key
    assert "has no effect (" in issue.message


def test_an_agents_answers_per_turn_point_to_the_group_size():
    _, (issue,) = canonicalize({**ENVS, "val_env_manager": {"generating_args": {"num_return_sequences": 2}}})
    assert "set val_env_manager.group_size" in issue.message


@pytest.mark.parametrize(
    ("key", "manager"),
    [
        ("actor_infer", "train_env_manager"),
        ("train_env_manager", "train_env_manager"),
        ("val_env_manager", "val_env_manager"),
    ],
)
def test_answers_per_prompt_are_the_group(key: str, manager: str):
    """ROLL's `num_return_sequences`; its default of 1 leaves the group size as it is."""
    for pipeline in ("rlvr", "online_dpo"):
        prompts = {
            **ENVS,
            "pipeline": pipeline,
            "data": {"dataset_name": "a"},
            "rewards": [{"name": "r", "kind": "math_rule"}],
        }
        counted = {key: {"generating_args": {"num_return_sequences": 6}}}
        config = validate_tree(canonical_tree({**prompts, **counted}))
        assert config == validate_tree({**prompts, manager: {"group_size": 6}})
        assert config != validate_tree(prompts)
        both = {manager: {"group_size": 4}, key: {"generating_args": {"num_return_sequences": 1}}}
        if key == manager:
            both = {manager: {**both[key], "group_size": 4}}
        assert canonicalize({**prompts, **both})[0][manager]["group_size"] == 4
        with pytest.raises(ConfigError, match=f"set {manager}.group_size alone"):
            canonical_tree({**prompts, **both, key: {**both[key], **counted[key]}})
