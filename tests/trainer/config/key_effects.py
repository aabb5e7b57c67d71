"""What shows the effect of each key of an algorithm: configurations, and what is changed in them."""

from typing import Any

from offbeat.services.messages.types import Group
from offbeat.trainer.config.corrections import ImportanceWeight, MismatchFilter, TrainInferCorrection
from offbeat.trainer.config.rewards import RewardNormalization, RewardShaping
from offbeat.trainer.config.roles import TeacherConfig, TeacherModelArgs

HERE = f"{__name__}:AlternatePairs"
RECOMPUTE = {"old_logprobs": "recompute"}
WEIGHTED = {**RECOMPUTE, "train_infer_correction": TrainInferCorrection(is_weight=ImportanceWeight())}
GAE = {"adv_estimator": "gae"}
KL_LOSS = {"use_kl_loss": True, "kl_loss_coef": 0.3}
KL_REWARD = {"add_token_level_kl": True, "init_kl_coef": 0.3}
ALL = {"zero_variance": "train"}

Change = tuple[dict[str, Any], dict[str, Any]]
"""A configuration, and what is changed in it."""


def teachers(**given: dict[str, Any]) -> dict[str, Any]:
    return {
        "teacher": {
            name: TeacherConfig(model_args=TeacherModelArgs(model_name_or_path=name), **settings)
            for name, settings in given.items()
        }
    }


TEACHERS: dict[str, Any] = teachers(one={})

EFFECTS: dict[str, list[Change]] = {
    "sequence_length": [({"loss_agg_mode": "seq-mean-token-sum-norm"}, {"sequence_length": 64})],
    "adv_estimator": [
        (ALL, {"adv_estimator": name})
        for name in (
            "reinforce",
            "dr_grpo",
            "rloo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "opo",
            "maxrl",
            "gdpo",
            "remax",
            "gigpo",
            "step_reinforce",
            "agentic_reinforce",
        )
    ]
    + [(ALL | TEACHERS, {"adv_estimator": "opd"})],
    "gae_level": [(GAE, {"gae_level": "turn"})],
    "value_targets": [(GAE | WEIGHTED, {"value_targets": "vtrace"})],
    "vtrace_rho_bar": [(GAE | WEIGHTED | {"value_targets": "vtrace"}, {"vtrace_rho_bar": 1.1})],
    "vtrace_c_bar": [(GAE | WEIGHTED | {"value_targets": "vtrace"}, {"vtrace_c_bar": 0.8})],
    "gamma": [({}, {"gamma": 0.9}), (GAE, {"gamma": 0.9}), ({"adv_estimator": "agentic_reinforce"}, {"gamma": 0.9})],
    "lambd": [(GAE, {"lambd": 0.5}), (GAE | {"gae_level": "turn"}, {"lambd": 0.5})],
    "bootstrap_truncated": [
        (GAE | more, {"bootstrap_truncated": True})
        for more in ({}, {"gae_level": "turn"}, WEIGHTED | {"value_targets": "vtrace"})
    ],
    "step_reward_gamma": [
        ({"adv_estimator": name}, {"step_reward_gamma": 0.5}) for name in ("gigpo", "step_reinforce")
    ],
    "episode_reward_weight": [({"adv_estimator": "gigpo"}, {"episode_reward_weight": 0.5})],
    "step_reward_weight": [({"adv_estimator": "gigpo"}, {"step_reward_weight": 0.5})],
    "reward_clip": [({}, {"reward_clip": 0.1})],
    "whiten_rewards": [({}, {"whiten_rewards": True})],
    "whiten_advantages": [
        ({}, {"whiten_advantages": True}),
        ({"adv_estimator": "reinforce_plus_plus"}, {"whiten_advantages": False}),
    ],
    "whiten_over": [
        ({"adv_estimator": "reinforce", "whiten_advantages": True}, {"whiten_over": "tags"}),
        ({"adv_estimator": "reinforce", "whiten_rewards": True}, {"whiten_over": "tags"}),
    ],
    "advantage_clip": [({}, {"advantage_clip": 0.1})],
    "zero_variance": [({}, ALL)],
    "group_filter_cls": [({}, {"group_filter_cls": HERE})],
    "difficulty_mask": [({}, {"difficulty_mask": True, "difficulty_low_threshold": 0.6})],
    "difficulty_low_threshold": [({"difficulty_mask": True}, {"difficulty_low_threshold": 0.6})],
    "difficulty_high_threshold": [({"difficulty_mask": True}, {"difficulty_high_threshold": 0.6})],
    "query_filter_config": [
        ({}, {"query_filter_config": {"tag0": {"type": "mean_filter", "filter_args": {"threshold_down": 0.6}}}}),
        ({}, {"query_filter_config": {"tag0": {"type": "mean_filter", "filter_args": {"threshold_up": 0.6}}}}),
        ({}, {"query_filter_config": {"tag0": {"type": "std_filter", "filter_args": {"std_threshold": 0.45}}}}),
    ],
    "variance_filter_ratio": [({}, {"variance_filter_ratio": 0.5})],
    "max_len_mask": [({}, {"max_len_mask": True})],
    "error_max_len_clip": [
        ({"adv_estimator": "reinforce"}, {"error_max_len_clip": True, "error_max_len_threshold": 1})
    ],
    "error_max_len_threshold": [
        ({"adv_estimator": "reinforce", "error_max_len_clip": True}, {"error_max_len_threshold": 1})
    ],
    "difficulty_loss_weight": [({}, {"difficulty_loss_weight": True})],
    "length_loss_weight": [({}, {"length_loss_weight": True})],
    "pg_variant": [
        ({}, {"pg_variant": name})
        for name in ("vanilla", "tis", "cispo", "topr", "kimi15", "aipo", "dppo_tv", "sapo", "gpg")
    ],
    "ratio_type": [({}, {"ratio_type": name}) for name in ("turn", "sequence", "sequence-token", "sequence-product")],
    "pg_clip": [({}, {"pg_clip": 0.05})],
    "pg_clip_low": [({}, {"pg_clip_low": 0.05})],
    "pg_clip_high": [({}, {"pg_clip_high": 0.05})],
    "dual_clip": [({}, {"dual_clip": 1.05})],
    "tis_lower_bound": [({"pg_variant": "tis"}, {"tis_lower_bound": 0.9})],
    "tis_upper_bound": [({"pg_variant": "tis"}, {"tis_upper_bound": 1.1})],
    "cispo_epsilon_low": [({"pg_variant": "cispo"}, {"cispo_epsilon_low": 0.1})],
    "cispo_epsilon_high": [({"pg_variant": "cispo"}, {"cispo_epsilon_high": 0.1})],
    "cispo_use_unified_mask": [({"pg_variant": "cispo", "cispo_epsilon_high": 0.1}, {"cispo_use_unified_mask": True})],
    "topr_positive_weight": [({"pg_variant": "topr"}, {"topr_positive_weight": 0.5})],
    "topr_negative_weight": [({"pg_variant": "topr"}, {"topr_negative_weight": 0.5})],
    "kimi15_tau": [({"pg_variant": "kimi15"}, {"kimi15_tau": 0.5})],
    "aipo_rho": [({"pg_variant": "aipo"}, {"aipo_rho": 1.1})],
    "dppo_mask_low": [({"pg_variant": "dppo_tv"}, {"dppo_mask_low": 0.02})],
    "dppo_mask_high": [({"pg_variant": "dppo_tv"}, {"dppo_mask_high": 0.02})],
    "dppo_kl_tau": [({"pg_variant": "dppo_tv"}, {"dppo_kl_tau": 0.1})],
    "sapo_temperature_pos": [({"pg_variant": "sapo"}, {"sapo_temperature_pos": 2.0})],
    "sapo_temperature_neg": [({"pg_variant": "sapo"}, {"sapo_temperature_neg": 2.0})],
    "old_logprobs": [({}, RECOMPUTE), ({}, {"old_logprobs": "loglinear"})],
    "loss_agg_mode": [
        ({}, {"loss_agg_mode": name})
        for name in ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    ],
    "loss_agg_length": [({"loss_agg_mode": "seq-mean-token-sum-norm"}, {"loss_agg_length": 7})],
    "entropy_loss_coef": [({}, {"entropy_loss_coef": 0.1})],
    "use_kl_loss": [({}, KL_LOSS)],
    "kl_loss_coef": [(KL_LOSS, {"kl_loss_coef": 0.1})],
    "kl_loss_type": [(KL_LOSS, {"kl_loss_type": name}) for name in ("k2", "abs", "full")],
    "add_token_level_kl": [({}, KL_REWARD)],
    "init_kl_coef": [(KL_REWARD, {"init_kl_coef": 0.1})],
    "kl_penalty": [(KL_REWARD, {"kl_penalty": name}) for name in ("k2", "k3", "abs")]
    + [(KL_REWARD | RECOMPUTE, {"kl_penalty": "full"})],
    "value_clip": [(GAE, {"value_clip": 0.05})],
    "use_opd": [(TEACHERS, {"use_opd": True}), (TEACHERS | GAE, {"use_opd": True})],
    "teacher": [({"use_opd": True} | TEACHERS, teachers(one={}, two={}))],
}
IN_THE_STEP = {
    "ppo_epochs", "critic_warmup", "target_kl", "kl_horizon", "entropy_loss_scheduler_type", "ref_model_sync_steps",
    "ref_model_mixup_alpha", "max_refill_ratio", "router_replay",
}  # fmt: skip
"""Shown by tests/trainer/training/test_optimizer_step.py, tests/trainer/learner/test_group_intake.py and, for mixtures of
experts, tests/integration/test_router_replay.py.
"""
OF_THE_ENGINE = {"model_args", "strategy_args", "infer_batch_size", "device_mapping"}
"""Of a teacher: which model, and its placement on processes (tests/integration/test_learner_engine.py)."""


def normalized(**given: Any) -> dict[str, Any]:
    return {"reward_normalization": RewardNormalization(**given)}


def shaping(**given: Any) -> dict[str, Any]:
    return {"reward_shaping": RewardShaping(**given)}


def corrected(*filters: MismatchFilter, **given: Any) -> dict[str, Any]:
    return {"train_infer_correction": TrainInferCorrection(filters=filters, **given)}


NESTED: dict[str, list[Change]] = {
    "TeacherConfig.tag_included": [({"use_opd": True} | TEACHERS, teachers(one={"tag_included": ("tag1",)}))],
    "TeacherConfig.opd_kl_coef": [
        ({"use_opd": True} | TEACHERS, teachers(one={"opd_kl_coef": 0.5})),
        ({"adv_estimator": "opd"} | TEACHERS, teachers(one={"opd_kl_coef": 0.5})),
    ],
    "RewardNormalization.grouping": [
        ({}, normalized(grouping="batch")),
        ({}, normalized(grouping="tags")),
        ({"adv_estimator": "step_reinforce"} | normalized(method="mean"),
         normalized(method="mean", grouping="state")),
    ],
    "RewardNormalization.method": [
        ({}, normalized(method="mean")), ({"adv_estimator": "gigpo"}, normalized(method="mean")),
        ({"adv_estimator": "reinforce"}, normalized(method="mean")),
    ],
    "RewardNormalization.norm_mean_type": [
        ({}, normalized(norm_mean_type=over, norm_std_type="group")) for over in ("batch", "running")
    ],
    "RewardNormalization.norm_std_type": [
        ({}, normalized(norm_mean_type="group", norm_std_type=over)) for over in (None, "batch", "running")
    ],
    "RewardShaping.overlong_max_length": [({}, shaping(overlong_max_length=4))],
    "RewardShaping.overlong_buffer": [(shaping(overlong_max_length=4), shaping(overlong_max_length=4, overlong_buffer=3))],
    "RewardShaping.overlong_penalty": [
        (shaping(overlong_max_length=4), shaping(overlong_max_length=4, overlong_penalty=0.5))
    ],
    "RewardShaping.function": [({}, shaping(function="tests.trainer.own_algorithm:pay_length"))],
    "TrainInferCorrection.function": [
        ({}, {"train_infer_correction": TrainInferCorrection(function="tests.trainer.own_algorithm:halve_first")})
    ],
    "RewardShaping.response_length_penalty_coef": [({}, shaping(response_length_penalty_coef=0.1))],
    "RewardShaping.format_penalty": [({}, shaping(format_penalty=0.5))],
    "RewardShaping.format_metric": [
        ({"adv_estimator": "reinforce"} | shaping(format_penalty=0.5), shaping(format_penalty=0.5, format_metric="odd"))
    ],
    "TrainInferCorrection.is_weight": [(RECOMPUTE, corrected(is_weight=ImportanceWeight()))],
    "TrainInferCorrection.filters": [({}, corrected(MismatchFilter(ratio_high=1.2)))],
    "TrainInferCorrection.m2_threshold": [(RECOMPUTE, corrected(m2_threshold=0.01))],
    "ImportanceWeight.weight_type": [
        (RECOMPUTE | corrected(is_weight=ImportanceWeight()), corrected(is_weight=ImportanceWeight(weight_type=unit)))
        for unit in ("turn", "geometric", "sequence")
    ],
    "ImportanceWeight.lower_bound": [
        (RECOMPUTE | corrected(is_weight=ImportanceWeight()), corrected(is_weight=ImportanceWeight(lower_bound=0.9)))
    ],
    "ImportanceWeight.upper_bound": [
        (RECOMPUTE | corrected(is_weight=ImportanceWeight()), corrected(is_weight=ImportanceWeight(upper_bound=1.1)))
    ],
    "MismatchFilter.agg_type": [
        (corrected(MismatchFilter(ratio_high=1.1)), corrected(MismatchFilter(ratio_high=1.1, agg_type=unit)))
        for unit in ("turn", "geometric", "sequence")
    ],
    "MismatchFilter.ratio_low": [({}, corrected(MismatchFilter(ratio_low=0.9)))],
    "MismatchFilter.ratio_high": [({}, corrected(MismatchFilter(ratio_high=1.1)))],
    "MismatchFilter.diff_low": [({}, corrected(MismatchFilter(diff_low=-0.05)))],
    "MismatchFilter.diff_high": [({}, corrected(MismatchFilter(diff_high=0.05)))],
    "MismatchFilter.binary_kl_high": [({}, corrected(MismatchFilter(binary_kl_high=0.01)))],
}  # fmt: skip


class AlternatePairs:
    """Keeps groups of each tag: tags alternate."""

    def __call__(self, group: Group) -> bool:
        return group.number // 2 % 2 == 1
