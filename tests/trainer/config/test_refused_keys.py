"""A key of an algorithm that would do nothing is refused."""

import pytest
from pydantic import ValidationError

from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.corrections import ImportanceWeight, MismatchFilter
from offbeat.trainer.config.rewards import RewardNormalization, RewardShaping
from tests.trainer.config.key_effects import corrected, normalized, shaping


@pytest.mark.parametrize(
    ("settings", "path", "says"),
    [
        ({"adv_estimator": "remax"} | normalized(method="mean"), "reward_normalization", "a baseline of its own"),
        ({"adv_estimator": "opd", "gamma": 0.9}, "gamma", "use_opd"),
        ({"adv_estimator": "opd", "use_opd": True}, "use_opd", "already"),
        ({"adv_estimator": "opd"} | normalized(method="mean"), "reward_normalization", "use_opd"),
        ({"adv_estimator": "opd"} | shaping(format_penalty=1.0), "reward_shaping", "use_opd"),
        ({"critic_warmup": 3}, "critic_warmup", "gae"),
        ({"lambd": 0.9}, "lambd", "gae"),
        ({"gae_level": "turn"}, "gae_level", "gae"),
        ({"adv_estimator": "gigpo", "gamma": 0.9}, "gamma", "step_reward_gamma"),
        ({"adv_estimator": "step_reinforce", "reward_clip": 1.0}, "reward_clip", "advantage_clip"),
        ({"adv_estimator": "gigpo", "add_token_level_kl": True}, "add_token_level_kl", "use_kl_loss"),
        ({"adv_estimator": "rloo"} | normalized(method="mean"), "reward_normalization", "a baseline of its own"),
        ({"adv_estimator": "dr_grpo"} | normalized(method="mean_std"), "reward_normalization", "grpo"),
        ({"adv_estimator": "gigpo"} | normalized(grouping="batch"), "reward_normalization", "only method has an effect"),
        (normalized(grouping="state"), "reward_normalization", "step_reinforce"),
        ({"adv_estimator": "rloo"} | normalized(grouping="batch"), "reward_normalization", "no effect"),
        ({"adv_estimator": "reinforce"} | normalized(grouping="tags"), "reward_normalization", "no effect"),
        (normalized(grouping="tags", norm_mean_type="batch"), "reward_normalization", "no effect"),
        ({"pg_variant": "vanilla", "ratio_type": "sequence"}, "ratio_type", "ppo"),
        ({"pg_variant": "tis", "pg_clip": 0.1}, "pg_clip", "ppo"),
        ({"cispo_epsilon_high": 0.2}, "cispo_epsilon_high", "cispo"),
        ({"pg_variant": "aipo", "old_logprobs": "recompute"}, "old_logprobs", "leave this out"),
        (corrected(is_weight=ImportanceWeight()), "train_infer_correction", "recompute"),
        (corrected(m2_threshold=0.1), "train_infer_correction", "recompute"),
        ({"zero_variance": "train", "difficulty_mask": True}, "difficulty_mask", "zero_variance=mask or refill"),
        ({"difficulty_low_threshold": 0.1}, "difficulty_low_threshold", "difficulty_mask"),
        ({"loss_agg_length": 5}, "loss_agg_length", "seq-mean-token-sum-norm"),
        ({"kl_loss_type": "k2"}, "kl_loss_type", "use_kl_loss"),
        ({"kl_horizon": 5}, "kl_horizon", "target_kl"),
        ({"ref_model_mixup_alpha": 0.5}, "ref_model_mixup_alpha", "ref_model_sync_steps"),
        ({"vtrace_c_bar": 2.0}, "vtrace_c_bar", "vtrace"),
    ],
)  # fmt: skip
def test_key_without_effect_is_rejected_with_remedy(settings: dict, path: str, says: str):
    with pytest.raises(ValidationError) as refused:
        AlgorithmConfig(**settings)
    assert [(error["loc"], says in error["msg"]) for error in refused.value.errors()] == [((path,), True)]


@pytest.mark.parametrize(
    ("table", "settings", "says"),
    [
        (RewardNormalization, {"method": "mean", "norm_std_type": "batch"}, "or take method=null"),
        (RewardShaping, {"overlong_buffer": 5}, "overlong_max_length"),
        (RewardShaping, {"format_metric": "x"}, "format_penalty"),
        (MismatchFilter, {}, "ratio_low"),
        (MismatchFilter, {"ratio_low": 2.0, "ratio_high": 1.0}, "not below"),
        (ImportanceWeight, {"lower_bound": 3.0}, "not below"),
    ],
)
def test_tables_reject_keys_without_effect(table: type, settings: dict, says: str):
    with pytest.raises(ValidationError, match=says):
        table(**settings)
