"""ROLL's RLVR files become ours."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from offbeat.deploy.config.importing.fitting import check_imported
from offbeat.deploy.config.importing.roll import import_roll, translate_roll
from offbeat.deploy.config.importing.trial import describe_trial, make_trial
from offbeat.deploy.config.loader import validate_tree
from tests.deploy.config.importing.roll_files import DISTILL, RLVR, by_key, write_changed


@pytest.mark.parametrize(
    ("changes", "whitening", "normalization", "equal_groups"),
    [
        ({"whiten_advantages": True}, "tags", None, "train"),
        ({"whiten_advantages": False}, None, None, None),
        (
            {"whiten_advantages": False, "norm_mean_type": "batch", "norm_std_type": "batch"},
            None,
            {"norm_mean_type": "group", "norm_std_type": "group", "grouping": "tags"},
            None,
        ),
        (
            {"whiten_advantages": False, "norm_mean_type": "group", "norm_std_type": "batch"},
            None,
            {"norm_mean_type": "group", "norm_std_type": "batch"},
            "train",
        ),
    ],
)
def test_rewards_and_advantages_are_compared_within_a_domain(
    changes: dict[str, Any],
    whitening: str | None,
    normalization: object,
    equal_groups: str | None,
    tmp_path: Path,
):
    """ROLL computes them by domain."""
    whole = {
        "adv_estimator": "reinforce",
        "difficulty_mask": False,
    }  # which leaves these groups out of ROLL's means, too
    tree, _, _ = translate_roll(write_changed(tmp_path, RLVR, whole | changes))
    assert tree.get("whiten_over") == whitening
    assert tree.get("zero_variance") == equal_groups, "groups with equal rewards count in a deviation that they share"
    assert tree.get("reward_normalization") == normalization


def test_evaluations_are_sampled_by_rolls_defaults(tmp_path: Path):
    rows = yaml.safe_load(RLVR.read_text())["validation"]["data_args"]
    validation = {"data_args": rows, "generating_args": {"temperature": 1.0}}
    tree = import_roll(write_changed(tmp_path, RLVR, {"validation": validation})).tree
    args = tree["val_env_manager"]["generating_args"]
    assert {name: args[name] for name in ("temperature", "top_p", "top_k")} == {
        "temperature": 1.0,
        "top_p": 0.7,
        "top_k": 50,
    }


@pytest.mark.parametrize(("stops", "expected"), [({}, []), ({"stop_strings": ["x"]}, ["x"])])
def test_evaluations_end_answers_at_their_own_stop_strings(
    stops: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    """By default at none, where ours are those of training."""
    source = yaml.safe_load(RLVR.read_text())
    infer = source["actor_infer"]
    infer["generating_args"] |= {"stop_strings": ["</code>"], "include_stop_str_in_output": False}
    validation = {"data_args": source["validation"]["data_args"], "generating_args": {"temperature": 1.0, **stops}}
    changes = {"actor_infer": infer, "validation": validation}
    tree = import_roll(write_changed(tmp_path, RLVR, changes)).tree
    assert tree["actor_infer"]["generating_args"]["stop_strings"] == ["</code>"]
    assert tree["val_env_manager"]["generating_args"]["stop_strings"] == expected


def test_a_kl_in_the_reward_has_rolls_coefficient(tmp_path: Path):
    tree, _, _ = translate_roll(write_changed(tmp_path, RLVR, {"add_token_level_kl": True}))
    assert (tree["add_token_level_kl"], tree["init_kl_coef"]) == (True, 0.2)
    assert "init_kl_coef" not in translate_roll(RLVR)[0]


def test_domains_become_tags_with_a_reward():
    tree, reports, _ = translate_roll(RLVR)
    domains = ["crossthinkqa", "ifeval", "math_rule", "code_sandbox", "llm_judge"]
    assert list(tree["custom_envs"]) == domains
    assert tree["custom_envs"]["math_rule"]["max_tokens_per_step"] == 4096
    rewards: list[dict[str, Any]] = tree["rewards"]
    kinds = [(each["name"], each["kind"], each["tags"]) for each in rewards]
    assert kinds == [
        ("crossthinkqa", "crossthink_qa", ["crossthinkqa"]),
        ("ifeval", "ifeval", ["ifeval"]),
        ("math_rule", "math_rule", ["math_rule"]),
        ("code_sandbox", "code_sandbox", ["code_sandbox"]),
        ("llm_judge", "llm_judge", ["llm_judge"]),
    ]
    assert rewards[0]["mode"] == "soft"
    judge = rewards[4]
    assert judge["model_args"] == {"model_name_or_path": "virtuoussy/Qwen2.5-7B-Instruct-RLVR", "dtype": "bfloat16"}
    assert judge["generating_args"] == {"max_new_tokens": 100, "temperature": 0.8}
    assert judge["strategy_args"]["strategy_config"]["max_model_len"] == 8000
    assert (judge["device"], judge["device_mapping"]) == ("cuda", "list(range(12,16))")
    assert "model_args" not in rewards[2]
    assert tree["data"]["tag_included"]["math_rule"] == ["deepmath_103k", "aime"]
    assert tree["data"]["domain_interleave_probs"]["math_rule"] == 0.4
    found = by_key(reports)
    assert "`template`" in found["rewards.llm_judge.judge_prompt"].outcome.note
    assert found["actor_infer.data_args.template"].outcome.status == "same"
    assert found["actor_train.data_args.interleave_probs"].outcome.status == "no effect"
    assert found["rewards.ifeval.reward_type"].outcome.status == "no effect"
    assert "code_KodCode" in tree["data"]["dataset_name"]
    assert "llm_judge_Multi" in found["actor_train.data_args.file_name"].outcome.note


def test_an_imported_file_runs_once_a_model_and_rows_are_there(tmp_path: Path):
    """With a judge's URL, and a filter that the file has as a comment."""
    text = RLVR.read_text().replace("# dynamic filter config\n#    query_filter_config:", "    query_filter_config:")
    text = text.replace("#      type: mean_filter\n#      filter_args:", "      type: mean_filter\n      filter_args:")
    text = text.replace(
        "#        threshold_up: 0.9\n#        threshold_down: 0.1",
        "        threshold_up: 0.9\n        threshold_down: 0.1",
    )
    text = text.replace("judge_model_type: inference", "judge_api_url: http://127.0.0.1:1/v1")
    (tmp_path / "rlvr.yaml").write_text(text)
    tree = import_roll(tmp_path / "rlvr.yaml").tree
    rows = [
        {"prompt": "2 + 2 =", "ground_truth": "4", "tag": values[0]} for values in tree["data"]["tag_included"].values()
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = make_trial(tree)
    tree["data"] |= {"dataset_name": str(tmp_path / "rows.jsonl"), "val_dataset_name": str(tmp_path / "rows.jsonl")}
    tree["output_dir"] = str(tmp_path / "run")
    assert check_imported(tree) == []
    config = validate_tree(tree)
    assert (config.zero_variance, {*config.query_filter_config}) == ("refill", {"math_rule"})
    assert config.query_filter_config["math_rule"].filter_args.threshold_up == 0.9


def test_a_trial_needs_no_model():
    """A laptop has no room for a teacher or judge of 7B: random weights and a rule take their place."""
    judged, taught = import_roll(RLVR).tree, import_roll(DISTILL).tree
    reward = make_trial(judged)["rewards"][4]
    assert reward == {"name": "llm_judge", "tags": ["llm_judge"], "kind": "regex", "pattern": "(..)*", "match": "full"}
    assert judged["rewards"][4]["kind"] == "llm_judge", "the file itself keeps it"
    assert make_trial(taught)["teacher"] == {"teacher": {"model_args": {"model_name_or_path": "tiny"}}}
    assert [line.partition(":")[0] for line in describe_trial(judged)][1:] == [
        "answers of at most 256 tokens, in place of 4096",
        "rewards",
    ]
    config = validate_tree(make_trial(judged))
    assert {env.max_tokens_per_step for env in config.custom_envs.values()} == {256}
    assert config.actor_infer.generating_args.max_new_tokens == 256
    assert config.val_env_manager.generating_args.max_new_tokens == 256
    assert judged["actor_infer"]["generating_args"]["max_new_tokens"] == 4096
    assert [line.partition(":")[0] for line in describe_trial(taught)][1:] == ["teacher.teacher"]


def test_a_judge_on_a_cluster_has_the_model_of_reward_model(tmp_path: Path):
    """As in ROLL's rlvr_config_8gpus_llm_as_judge_server.yaml."""
    source = yaml.safe_load(RLVR.read_text())
    judge = source["rewards"]["llm_judge"]
    source["reward_model"] = {
        "name": "reward_llm",
        "model_args": {"model_name_or_path": "another", "dtype": "bf16"},
        **{key: judge.pop(key) for key in ("strategy_args", "device_mapping")},
    }
    judge |= {"judge_model_type": "cluster", "world_size": 32}
    (tmp_path / "rlvr.yaml").write_text(yaml.safe_dump(source, sort_keys=False))
    expected, _, _ = translate_roll(RLVR)
    tree, reports, _ = translate_roll(tmp_path / "rlvr.yaml")
    assert tree["rewards"][4] == expected["rewards"][4]
    found = by_key(reports)
    assert found["reward_model.device_mapping"].outcome.target == ("rewards", "llm_judge", "device_mapping")
    assert found["reward_model.model_args.model_name_or_path"].outcome.status == "no effect"
    assert found["reward_model.name"].outcome.status == "no effect"


def test_a_domain_without_a_share_is_not_trained(tmp_path: Path):
    text = (
        RLVR.read_text().replace("llm_judge: 0.1", "# llm_judge: 0.1").replace("code_sandbox: 0.3", "code_sandbox: 0.4")
    )
    (tmp_path / "rlvr.yaml").write_text(text)
    config = validate_tree(import_roll(tmp_path / "rlvr.yaml").tree)
    trained = ["crossthinkqa", "ifeval", "math_rule", "code_sandbox"]
    assert config.train_env_manager.tags == tuple(trained)
    assert [*config.custom_envs] == [*trained, "llm_judge"]


def test_a_policy_named_twice_and_a_critic_with_a_new_head_are_taken(tmp_path: Path):
    """`model_type: trl` is a language model with a value head."""
    source = yaml.safe_load(RLVR.read_text())
    source["actor_train"]["model_args"]["model_name_or_path"] = "${pretrain}"
    source |= {"adv_estimator": "gae", "critic": {"model_args": {"model_type": "trl", "dtype": "bf16"}}}
    (tmp_path / "rlvr.yaml").write_text(yaml.safe_dump(source, sort_keys=False))
    imported = import_roll(tmp_path / "rlvr.yaml")
    assert imported.to_do == ()
    config = validate_tree(imported.tree)
    assert config.critic.model_args.model_type is None
    assert "model_name_or_path" not in imported.tree["actor_train"]["model_args"]


@pytest.mark.parametrize(
    ("accumulation", "epochs", "batches"), [(32, 1, 20), (16, 1, 10), (16, 2, 5), (6, 1, 4), (64, 2, 10)]
)
def test_a_warm_up_counts_batches_in_place_of_optimizer_steps(
    accumulation: int, epochs: int, batches: int, tmp_path: Path
):
    """ROLL's schedule advances with the optimizer, Offbeat's with the batch."""
    source = yaml.safe_load(RLVR.read_text())
    source["actor_train"]["training_args"]["gradient_accumulation_steps"] = accumulation
    source["ppo_epochs"] = epochs
    (tmp_path / "rlvr.yaml").write_text(yaml.safe_dump(source, sort_keys=False))
    training = translate_roll(tmp_path / "rlvr.yaml")[0]["actor_train"]["training_args"]
    assert training["warmup_steps"] == batches


def test_a_critic_without_a_rate_has_rolls(tmp_path: Path):
    source = yaml.safe_load(RLVR.read_text()) | {"adv_estimator": "gae", "critic": {"model_args": {"dtype": "bf16"}}}
    (tmp_path / "rlvr.yaml").write_text(yaml.safe_dump(source, sort_keys=False))
    assert translate_roll(tmp_path / "rlvr.yaml")[0]["critic"]["training_args"] == {"learning_rate": 5e-5}


@pytest.mark.parametrize(
    ("lines", "answer", "validation"),
    [
        ("", 4096, 4096),
        ("sequence_length: 3072", 1024, 1024),  # before response_length
        ("val_prompt_length: 1024\nval_sequence_length: 9216", 4096, 8192),
    ],
)
def test_answers_are_as_long_as_roll_makes_them(lines: str, answer: int, validation: int, tmp_path: Path):
    """ROLL replaces `max_new_tokens` by `sequence_length - prompt_length`."""
    text = RLVR.read_text().replace("max_new_tokens: ${response_length}", "max_new_tokens: 7", 1)
    (tmp_path / "rlvr.yaml").write_text(f"{text}\n{lines}\n")
    tree, _, _ = translate_roll(tmp_path / "rlvr.yaml")
    assert tree["actor_infer"]["generating_args"]["max_new_tokens"] == answer
    assert tree["val_env_manager"]["generating_args"]["max_new_tokens"] == validation
    assert {env["max_tokens_per_step"] for env in tree["custom_envs"].values()} == {answer}
    without = re.sub(r"^ +max_new_tokens: \$.*\n", "", RLVR.read_text(), flags=re.MULTILINE)
    (tmp_path / "short.yaml").write_text(f"{without}\n{lines}\n")
    assert translate_roll(tmp_path / "short.yaml")[0]["actor_infer"]["generating_args"]["max_new_tokens"] == answer


def test_prompts_are_counted_as_trajectories():
    tree, _, _ = translate_roll(RLVR)
    assert tree["rollout_batch_size"] == 64 * 8
    assert tree["train_env_manager"] == {"group_size": 8, "num_env_groups": 64}
    assert tree["sequence_length"] == 2048 + 4096
    assert tree["actor_infer"]["strategy_args"]["strategy_config"]["max_model_len"] == 8000
    assert tree["val_env_manager"]["generating_args"]["temperature"] == 0.6


@pytest.mark.parametrize(
    ("lines", "max_staleness", "num_env_groups"),
    [
        ("is_use_additional_prompts: true", 16 / 64, 64 + 16),
        ("is_use_additional_prompts: true\nmax_additional_running_prompts: 32", 0.5, 64 + 32),
        ("is_use_additional_prompts: true\nasync_generation_ratio: 1", 1.25, 2 * 64 + 16),
        ("max_additional_running_prompts: 32", 0, 64),
    ],
)
def test_additional_prompts_are_a_part_of_a_batch_ahead(
    lines: str, max_staleness: float, num_env_groups: int, tmp_path: Path
):
    (tmp_path / "rlvr.yaml").write_text(f"{RLVR.read_text()}\n{lines}\n")
    tree, reports, _ = translate_roll(tmp_path / "rlvr.yaml")
    assert (tree["max_staleness"], tree["train_env_manager"]["num_env_groups"]) == (max_staleness, num_env_groups)
    assert not [each for each in reports if each.outcome.status == "no counterpart" and "additional" in str(each.key)]
