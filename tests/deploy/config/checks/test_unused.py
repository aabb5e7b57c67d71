"""Keys of the run that another key leaves without effect."""

import json
from typing import Any

import pytest

from offbeat.deploy.config.checks.unused import check_unused
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.saving import to_saved_tree

Settings = dict[str, Any]

LAKE = {"custom_envs": {"lake": {"env_type": "frozen_lake"}}}
SFT = {"pipeline": "sft", "data": {"dataset_name": "rows.jsonl"}}
VALIDATED_SFT = SFT | {"data": {"dataset_name": "rows.jsonl", "val_dataset_name": "val.jsonl"}}
RLVR = {"pipeline": "rlvr", "data": SFT["data"], "custom_envs": {"math": {"env_type": "prompt"}}}
VALIDATED_RLVR = RLVR | {"data": VALIDATED_SFT["data"]}
ONLINE = LAKE | {"pipeline": "online_dpo"}
PRIORITIZED = {"samples_per_insert": 2.0, "sampler": "prioritized"}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
GSPO_LENGTHS = {"reward_shaping": {"overlong_max_length": 600, "overlong_buffer": 50}, "sequence_length": 512}


def issues(settings: Settings) -> dict[str, str]:
    config = RunConfig.model_validate_json(json.dumps(settings))
    return {issue.path: issue.message for issue in check_unused(config)}


def attention(train: Settings, **roles: str) -> Settings:
    names = {role: {"model_args": {"attn_implementation": name}} for role, name in roles.items()}
    return LAKE | {"actor_train": {"model_args": train}} | names


def shares(*partition: int, manager: str = "train_env_manager", **settings: int) -> Settings:
    table = {"tags": ["lake", "pond"], "num_groups_partition": partition, **settings}
    return {"custom_envs": dict.fromkeys(table["tags"], LAKE["custom_envs"]["lake"]), manager: table}


def env(**settings: Any) -> Settings:
    return {"custom_envs": {"lake": {"env_type": "frozen_lake", **settings}}}


def tokens(role: str, limit: int) -> Settings:
    return {role: {"generating_args": {"max_new_tokens": limit}}}


def answer(**settings: Any) -> Settings:
    return VALIDATED_RLVR | {"rewards": [{"name": "answer", "kind": "math_rule", **settings}]}


def gate(**settings: Any) -> Settings:
    return answer(**settings, threshold=0.5) | {"combine": "gate"}


def judge(**settings: Any) -> Settings:
    table = {"name": "judge", "kind": "llm_judge", "url": "http://127.0.0.1:1/v1", "model": "m", **settings}
    return VALIDATED_RLVR | {"rewards": [table]}


@pytest.mark.parametrize(
    ("settings", "path", "says", "fitting"),
    [
        (
            attention({"shared_prefix": True}, reference="sdpa") | KL,
            "reference.model_args.attn_implementation",
            "with actor_train.model_args.shared_prefix, which needs packed attention",
            attention({"shared_prefix": False}, reference="sdpa") | KL,
        ),
        (
            attention({"shared_prefix": True}, critic="eager") | {"adv_estimator": "gae"},
            "critic.model_args.attn_implementation",
            "of every role: leave it out",
            attention({"shared_prefix": True}, critic="auto") | {"adv_estimator": "gae"},
        ),
        (
            env(max_tokens_per_step=65) | tokens("actor_infer", 64),
            "custom_envs.lake.max_tokens_per_step",
            "65 exceeds actor_infer.generating_args.max_new_tokens, 64",
            env(max_tokens_per_step=65),
        ),
        (
            env(max_tokens_per_step=96) | tokens("train_env_manager", 80) | tokens("val_env_manager", 64),
            "custom_envs.lake.max_tokens_per_step",
            "96 exceeds train_env_manager.generating_args.max_new_tokens, 80",
            env(max_tokens_per_step=96) | tokens("train_env_manager", 80) | tokens("val_env_manager", 96),
        ),
        (
            SFT | env(max_tokens_per_step=96) | tokens("val_env_manager", 80),
            "custom_envs.lake.max_tokens_per_step",
            "96 exceeds val_env_manager.generating_args.max_new_tokens, 80",
            SFT | env(max_tokens_per_step=96) | tokens("val_env_manager", 96),
        ),
        (SFT | {"eval_steps": 5}, "eval_steps", "without data.val_dataset_name", VALIDATED_SFT | {"eval_steps": 5}),
        (SFT | {"val_batch_size": 8}, "val_batch_size", "pipeline: sft without custom_envs", SFT | LAKE),
        (
            VALIDATED_SFT | {"final_val_batch_size": 8},
            "final_val_batch_size",
            "set them to evaluate by sampling",
            VALIDATED_SFT | LAKE | {"final_val_batch_size": 8},
        ),
        (
            SFT | {"val_env_manager": {"generating_args": {"top_p": 0.9}}},
            "val_env_manager.generating_args.top_p",
            "without custom_envs",
            SFT | LAKE | {"val_env_manager": {"generating_args": {"top_p": 0.9}}},
        ),
        (SFT | {"render_episodes": 4}, "render_episodes", "without custom_envs", LAKE | {"render_episodes": 4}),
        (
            RLVR | {"val_env_manager": {"group_size": 4}},
            "val_env_manager.group_size",
            "pipeline: rlvr without data.val_dataset_name",
            VALIDATED_RLVR | {"val_env_manager": {"group_size": 4}},
        ),
        (
            RLVR | {"eval_steps": 5},
            "eval_steps",
            "set that, take 0, or leave this out",
            VALIDATED_RLVR | {"eval_steps": 5},
        ),
        (
            SFT | {"train_env_manager": {"tags": ["lake"]}},
            "train_env_manager.tags",
            "has no effect with pipeline: sft",
            LAKE | {"train_env_manager": {"tags": ["lake"]}},
        ),
        (
            SFT | {"train_env_manager": {"group_size_redundancy": 1}},
            "train_env_manager.group_size_redundancy",
            "has no effect with pipeline: sft",
            RLVR | {"train_env_manager": {"group_size_redundancy": 1}},
        ),
        (
            SFT | {"weights": {"dtype": "bfloat16"}},
            "weights.dtype",
            "samples nothing without custom_envs",
            SFT | LAKE | {"weights": {"dtype": "bfloat16"}},
        ),
        (
            SFT | {"rollout": {"coalesce_s": 0.1}},
            "rollout.coalesce_s",
            "samples nothing",
            SFT | LAKE | {"rollout": {"coalesce_s": 0.1}},
        ),
        (
            {
                "custom_envs": dict.fromkeys(("lake", "pond"), LAKE["custom_envs"]["lake"]),
                "train_env_manager": {"tags": ["lake"]},
                "query_filter_config": {"pond": {"type": "mean_filter"}},
            },
            "query_filter_config.pond",
            "as train_env_manager.tags are lake: add the tag",
            LAKE | {"query_filter_config": {"lake": {"type": "mean_filter"}}},
        ),
        (
            env(memory_gib=2.0),
            "custom_envs.lake.memory_gib",
            "with execution=thread: leave it out, or take execution=process",
            env(memory_gib=2.0, execution="process"),
        ),
        (
            env(tool_call_parser="mistral", agent_runner={"path": "agents:play"}),
            "custom_envs.lake.tool_call_parser",
            "set agent_runner.tool_call_parser",
            env(tool_call_parser="mistral"),
        ),
        (
            env(execution="inline") | {"rollout": {"num_threads": 2}},
            "rollout.num_threads",
            "no env has execution=thread",
            LAKE | {"rollout": {"num_threads": 2}},
        ),
        (
            LAKE | {"rollout": {"max_env_num_per_worker": 8}, "train_env_manager": {"max_env_num_per_worker": 9}},
            "train_env_manager.max_env_num_per_worker",
            "above rollout.max_env_num_per_worker, 8",
            LAKE | {"rollout": {"max_env_num_per_worker": 8}, "train_env_manager": {"max_env_num_per_worker": 8}},
        ),
        (
            LAKE | GSPO_LENGTHS,
            "reward_shaping.overlong_max_length",
            "the penalty starts at 550 tokens, and sequence_length is 512",
            LAKE | GSPO_LENGTHS | {"sequence_length": 1024},
        ),
        (
            LAKE | {"error_max_len_clip": True},
            "error_max_len_threshold",
            "1024 is never exceeded within a sequence_length of 512",
            LAKE | {"error_max_len_clip": True, "error_max_len_threshold": 256},
        ),
        (
            answer(queue_timeout_s=5.0),
            "rewards.0.queue_timeout_s",
            "in env workers (num_replicas=0)",
            answer(queue_timeout_s=5.0, num_replicas=1),
        ),
        (gate(weight=2.0), "rewards.0.weight", "with a threshold, which makes", gate()),
        (
            judge(verdict="yes_no", max_score=5),
            "rewards.0.max_score",
            "with verdict: yes_no: leave it out, or take score or rubric",
            judge(max_score=5),
        ),
        (
            judge(rubric_key="other"),
            "rewards.0.rubric_key",
            "with verdict: score: leave it out, or take rubric",
            judge(rubric_key="other", verdict="rubric"),
        ),
        (
            judge(compared_key="other"),
            "rewards.0.compared_key",
            "with verdict: score: leave it out, or take pairwise",
            judge(compared_key="other", verdict="pairwise"),
        ),
        (
            judge(rubric_key="other", verdict="rubric", criteria={"a": 1.0}),
            "rewards.0.rubric_key",
            "with criteria: leave one of them out",
            judge(verdict="rubric", criteria={"a": 1.0}),
        ),
        (
            LAKE | {"telemetry": {"sample_rate": 0.5}},
            "telemetry.sample_rate",
            "without telemetry.otlp_endpoint",
            LAKE | {"telemetry": {"sample_rate": 0.5, "otlp_endpoint": "http://127.0.0.1:4318"}},
        ),
        (
            LAKE | {"redis": {"url": "redis://127.0.0.1", "appendfsync": "always"}},
            "redis.appendfsync",
            "with redis.url",
            LAKE | {"redis": {"appendfsync": "always"}},
        ),
        (
            LAKE | {"weights": {"url": "/shared/weights"}},
            "weights.url",
            "with weights.transport=shm: leave it out, or take transport=fs",
            LAKE | {"weights": {"url": "/shared/weights", "transport": "fs"}},
        ),
        (
            shares(0, 8),
            "train_env_manager.num_groups_partition",
            "lake with 0 groups is never played: take 1 or more",
            shares(1, 7),
        ),
        (shares(-1, 9), "train_env_manager.num_groups_partition", "lake with -1 groups", shares(4, 4)),
        (
            shares(1, 2),
            "train_env_manager.num_groups_partition",
            "its sum is 3, num_env_groups is 8: make them equal",
            shares(1, 2, num_env_groups=3, manager="val_env_manager"),
        ),
        (
            LAKE | {"replay": {"samples_per_insert": 2.0, "max_staleness": 0.0}},
            "replay.max_staleness",
            "0 replays nothing",
            LAKE | {"replay": {"samples_per_insert": 2.0, "max_staleness": 1.0}},
        ),
        (
            ONLINE | {"replay": PRIORITIZED},
            "replay.sampler",
            "prioritized replay of pairs is biased",
            ONLINE | {"replay": PRIORITIZED | {"importance_sampling_exponent": 0.0}},
        ),
        (
            ONLINE | {"staleness_controller": {"max_mismatch_kl": 0.01}, "train_env_manager": {"num_env_groups": 16}},
            "staleness_controller.max_mismatch_kl",
            "whose steps measure neither",
            LAKE | {"staleness_controller": {"max_mismatch_kl": 0.01}, "train_env_manager": {"num_env_groups": 16}},
        ),
        (
            LAKE | {"reward_shaping": {"overlong_max_length": 100, "overlong_buffer": 200}},
            "reward_shaping.overlong_buffer",
            "200 exceeds overlong_max_length, 100, so that even an empty answer is penalized",
            LAKE | {"reward_shaping": {"overlong_max_length": 100, "overlong_buffer": 100}},
        ),
        (
            SFT | {"actor_infer": {"kv_cache_gib": 2.0}},
            "actor_infer.kv_cache_gib",
            "has no effect with pipeline: sft, which samples nothing without custom_envs",
            SFT | LAKE | {"actor_infer": {"kv_cache_gib": 2.0}},
        ),
        (
            LAKE | {"actor_infer": {"keep_sessions": True, "strategy_args": {"strategy_name": "hf_infer"}}},
            "actor_infer.keep_sessions",
            "with hf_infer: sessions stay in vLLM alone",
            LAKE | {"actor_infer": {"keep_sessions": True}},
        ),
        (
            LAKE | {"record_batches": 16},
            "record_batches",
            "console.keep_steps keeps 16 steps",
            LAKE | {"record_batches": 17},
        ),
    ],
)
def test_keys_that_another_key_switches_off_are_refused(settings: Settings, path: str, says: str, fitting: Settings):
    found = issues(settings)
    assert list(found) == [path]
    assert says in found[path]
    assert issues(fitting) == {}


@pytest.mark.parametrize("limits", [tokens("actor_infer", 32), tokens("val_env_manager", 32)])
def test_an_implied_limit_of_a_tags_answers_is_cut_silently(limits: Settings):
    assert issues(LAKE | limits) == {}
    assert issues(to_saved_tree(RunConfig.model_validate_json(json.dumps(LAKE | limits)))) == {}


@pytest.mark.parametrize("settings", [LAKE, SFT, VALIDATED_SFT, RLVR, VALIDATED_RLVR, answer()])
def test_defaults_are_accepted_when_written(settings: Settings):
    """As in a run's saved configuration, which has every key."""
    saved = RunConfig.model_validate_json(json.dumps(settings)).model_dump(mode="json")
    assert issues(saved) == {}


def test_switched_off_evaluation_is_accepted():
    assert issues(SFT | {"eval_steps": 0}) == issues(RLVR | {"eval_steps": 0}) == {}
