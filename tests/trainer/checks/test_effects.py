from typing import Any

import pytest

from offbeat.trainer.checks.effects import check_effects
from offbeat.trainer.config.learner import LearnerConfig

RECOMPUTED = {"adv_estimator": "reinforce", "old_logprobs": "recompute"}
ZERO = "actor_train.strategy_args.strategy_config.zero_optimization"
TWO_STEPS = {"actor_train": {"training_args": {"num_minibatches": 2}}}


def strategy(**settings: Any) -> dict[str, Any]:
    return {"actor_train": {"strategy_args": {"strategy_config": settings}}}


def zero(stage_of_run: int = 0, **settings: Any) -> dict[str, Any]:
    arguments = {"zero_stage": stage_of_run, "strategy_config": {"zero_optimization": settings}}
    return {"actor_train": {"strategy_args": arguments}}


def paths(settings: dict[str, Any], group_size: int = 4) -> list[str]:
    config = LearnerConfig.model_validate(settings)
    return [issue.path for issue in check_effects(config, group_size=group_size)]


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        (RECOMPUTED | {"pg_clip": 0.1}, "pg_clip"),
        (RECOMPUTED | {"pg_clip_high": 0.3}, "pg_clip_high"),
        (RECOMPUTED | {"dual_clip": 3.0}, "dual_clip"),
        (RECOMPUTED | {"pg_variant": "cispo", "cispo_epsilon_low": 0.3}, "cispo_epsilon_low"),
        (RECOMPUTED | {"pg_variant": "cispo", "cispo_epsilon_high": 0.3}, "cispo_epsilon_high"),
        (RECOMPUTED | {"pg_variant": "cispo", "cispo_use_unified_mask": True}, "cispo_use_unified_mask"),
        (RECOMPUTED | {"pg_variant": "sapo", "sapo_temperature_pos": 2.0}, "sapo_temperature_pos"),
        (RECOMPUTED | {"pg_variant": "sapo", "sapo_temperature_neg": 2.0}, "sapo_temperature_neg"),
        (RECOMPUTED | {"pg_variant": "tis", "tis_upper_bound": 1.5}, "tis_upper_bound"),
        (RECOMPUTED | {"pg_variant": "kimi15", "kimi15_tau": 0.3}, "kimi15_tau"),
        ({"adv_estimator": "gae", "value_clip": 0.2}, "value_clip"),
    ],
)
def test_clips_need_more_than_one_optimizer_step(settings: dict[str, Any], path: str):
    assert paths(settings) == [path]
    assert paths(settings | TWO_STEPS) == paths(settings | {"ppo_epochs": 2}) == []
    if path != "value_clip":
        assert paths(settings | {"old_logprobs": "behavior"}) == []


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"adv_estimator": "reinforce", "zero_variance": "refill"}, "zero_variance"),
        ({"adv_estimator": "gae", "gamma": 0.0, "lambd": 0.9}, "lambd"),
        ({"adv_estimator": "gigpo", "step_reward_weight": 0.0, "step_reward_gamma": 0.9}, "step_reward_gamma"),
        ({"pg_variant": "cispo", "ratio_type": "sequence-token"}, "ratio_type"),
        ({"max_staleness": 0.0, "old_logprobs": "loglinear"}, "old_logprobs"),
        ({"max_staleness": 0.0, "replay": {"samples_per_insert": 2.0}}, "replay.samples_per_insert"),
        (
            {"rollout_batch_size": 8, "actor_train": {"training_args": {"num_minibatches": 9}}},
            "actor_train.training_args.num_minibatches",
        ),
        *(
            (
                {
                    "pipeline": pipeline,
                    "rollout_batch_size": 16,
                    "actor_train": {"training_args": {"num_minibatches": 5}},
                },
                "actor_train.training_args.num_minibatches",
            )
            for pipeline in ("dpo", "online_dpo")
        ),
        ({"pipeline": "dpo", "dpo": {"loss_type": "robust"}}, "dpo.loss_type"),
        ({"replay": {"samples_per_insert": 2.0, "sampler": "prioritized", "priority_exponent": 0.0}}, "replay.sampler"),
        ({"query_filter_config": {"lake": {"type": "std_filter"}}}, "query_filter_config.lake"),
        (
            {"query_filter_config": {"lake": {"type": "mean_filter", "filter_args": {"threshold_down": 1.0}}}},
            "query_filter_config.lake.filter_args",
        ),
        (zero(stage3_max_live_parameters=1), f"{ZERO}.stage3_max_live_parameters"),
        (zero(offload_param={"device": "cpu"}), f"{ZERO}.offload_param"),
        (zero(offload_optimizer={"device": "cpu"}), f"{ZERO}.offload_optimizer"),
        (zero(stage=2), f"{ZERO}.stage"),
        (strategy(gradient_clipping=0.5), "actor_train.strategy_args.strategy_config.gradient_clipping"),
        (strategy(gradient_allreduce_op="sum"), "actor_train.strategy_args.strategy_config.gradient_allreduce_op"),
        (strategy(zero_optimisation={}), "actor_train.strategy_args.strategy_config.zero_optimisation"),
    ],
)
def test_keys_without_effect_are_refused(settings: dict[str, Any], path: str):
    assert paths(settings) == [path]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        RECOMPUTED | {"pg_variant": "tis", "tis_upper_bound": 0.5},
        RECOMPUTED | {"pg_variant": "tis", "tis_lower_bound": 1.5},
        {"adv_estimator": "reinforce", "zero_variance": "refill", "difficulty_mask": True},
        {
            "adv_estimator": "reinforce_plus_plus",
            "zero_variance": "refill",
            "query_filter_config": {"lake": {"type": "mean_filter"}},
        },
        {"pipeline": "dpo", "rollout_batch_size": 16, "actor_train": {"training_args": {"num_minibatches": 4}}},
        strategy(gradient_allreduce_op="mean"),
        RECOMPUTED | {"ratio_type": "sequence"},
        {"max_staleness": 0.0, "replay": {"samples_per_insert": 2.0, "max_staleness": 3.0}},
        {"pipeline": "dpo", "dpo": {"loss_type": "robust", "label_smoothing": 0.1}},
        {"pipeline": "dpo", "dpo": {"loss_type": "sigmoid"}},
        {"replay": {"samples_per_insert": 2.0, "sampler": "prioritized"}},
        {"query_filter_config": {"lake": {"type": "std_filter", "filter_args": {"std_threshold": 0.1}}}},
        {"query_filter_config": {"lake": {"type": "mean_filter"}}},
        {"adv_estimator": "reinforce", "query_filter_config": {"lake": {"type": "std_filter"}}},
        {"adv_estimator": "gigpo", "query_filter_config": {"lake": {"type": "std_filter"}}},
        {"reward_shaping": {"format_penalty": 1.0}, "query_filter_config": {"lake": {"type": "std_filter"}}},
        strategy(zero_optimization={"reduce_bucket_size": 1000}),
        zero(stage=0),
        zero(1, offload_optimizer={"device": "cpu"}),
        zero(3, stage=3, stage3_max_live_parameters=1, offload_param={"device": "cpu"}),
        {"pretrain": "/models/qwen", "tiny": {"num_hidden_layers": 3}},  # `offbeat train quickstart pretrain=...`
    ],
)
def test_keys_with_an_effect_are_accepted(settings: dict[str, Any]):
    assert paths(settings) == []


def test_variance_of_groups_of_one_selects_nothing():
    assert paths({"adv_estimator": "reinforce", "variance_filter_ratio": 0.5}, group_size=1) == [
        "variance_filter_ratio"
    ]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"pipeline": "dpo", "dpo": {"loss_type": "robust"}}, "robust without label_smoothing equals sigmoid"),
        ({"query_filter_config": {"lake": {"type": "std_filter"}}}, "no signal with adv_estimator grpo"),
        (zero(stage3_max_live_parameters=1), "has no effect with zero_stage=0: leave it out, or take zero_stage=3"),
        (zero(1, stage=2), "2 disagrees with zero_stage 1: set that alone"),
    ],
)
def test_a_refusal_says_what_decides_instead(settings: dict[str, Any], says: str):
    (issue,) = check_effects(LearnerConfig.model_validate(settings), group_size=4)
    assert says in issue.message


def test_16_bits_are_of_zero_stage_1():
    half = zero(stage=1, offload_optimizer={"device": "cpu"})
    half["actor_train"]["model_args"] = {"dtype": "bfloat16"}
    assert paths(half) == []


def test_unknown_deepspeed_keys_name_the_nearest():
    config = LearnerConfig.model_validate(strategy(zero_optimisation={}))
    (issue,) = check_effects(config, group_size=4)
    assert "did you mean zero_optimization?" in issue.message
