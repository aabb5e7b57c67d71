from typing import Any

import pytest

from offbeat.trainer.checks.overruled import check_overruled
from offbeat.trainer.config.algorithm import AlgorithmConfig

X = {"model_args": {"model_name_or_path": "x"}}

TIS, CISPO = {"pg_variant": "tis", "tis_upper_bound": 1.5}, {"pg_variant": "cispo", "cispo_epsilon_high": 0.5}
OVER_THE_BATCH = {"reward_normalization": {"norm_mean_type": "group", "norm_std_type": "batch"}}


def filtered(**bounds: float) -> dict[str, Any]:
    return {"train_infer_correction": {"filters": [bounds]}}


def paths(settings: dict[str, Any]) -> list[str]:
    return [issue.path for issue in check_overruled(AlgorithmConfig.model_validate(settings, strict=False))]


@pytest.mark.parametrize(
    ("settings", "is_equal"),
    [
        ({"adv_estimator": "grpo"}, True),
        ({"adv_estimator": "rloo"}, True),
        ({"adv_estimator": "reinforce", "reward_normalization": {"method": "mean"}}, True),
        ({"adv_estimator": "reinforce"}, False),
        ({"adv_estimator": "agentic_reinforce"}, False),
        ({"adv_estimator": "reinforce_plus_plus"}, False),
        ({"adv_estimator": "tests.trainer.own_algorithm:center"}, False),
    ],
)
def test_tokens_of_an_episode_have_one_advantage_where_its_reward_is_one(settings: dict[str, Any], is_equal: bool):
    """Estimators without a comparison take the rewards of turns, and a function gives any advantage to a token."""
    assert paths(settings | {"ratio_type": "sequence-token"}) == (["ratio_type"] if is_equal else [])


@pytest.mark.parametrize(
    ("settings", "path", "remedy"),
    [
        ({"ratio_type": "sequence-token"}, "ratio_type", {"gamma": 0.9}),
        ({"ratio_type": "sequence-token", "pg_variant": "cispo", "gamma": 0.9}, "ratio_type", {"pg_variant": "ppo"}),
        (
            {"ratio_type": "turn", "pg_variant": "topr", "topr_negative_weight": 0.0},
            "ratio_type",
            {"topr_negative_weight": 0.5},
        ),
        ({"adv_estimator": "reinforce_plus_plus", "whiten_rewards": True}, "whiten_rewards", {"reward_clip": 0.5}),
        ({"whiten_over": "tags"}, "whiten_over", {"whiten_advantages": True}),
        ({"whiten_over": "tags"}, "whiten_over", {"whiten_rewards": True}),
        (
            {"whiten_over": "tags", "adv_estimator": "reinforce_plus_plus", "whiten_advantages": False},
            "whiten_over",
            {"whiten_advantages": None},
        ),
        (
            {"adv_estimator": "reinforce_plus_plus"} | OVER_THE_BATCH,
            "reward_normalization.norm_std_type",
            {"whiten_advantages": False},
        ),
        (
            {"adv_estimator": "opd", "whiten_advantages": True, "teacher": {"one": {**X, "opd_kl_coef": 0.5}}},
            "teacher.one.opd_kl_coef",
            {"teacher": {"one": {**X, "opd_kl_coef": 0.5}, "two": X}},
        ),
        ({"pg_clip_high": 0.3, **filtered(ratio_high=1.2)}, "pg_clip_high", {"pg_clip_high": 0.1}),
        ({"pg_clip_low": 0.3, **filtered(ratio_low=0.8)}, "pg_clip_low", {"pg_clip_low": 0.1}),
        (TIS | filtered(ratio_high=1.2), "tis_upper_bound", {"ratio_type": "turn"}),
        (CISPO | filtered(ratio_high=1.5), "cispo_epsilon_high", filtered(ratio_low=0.5)),
        ({"pg_variant": "aipo", "aipo_rho": 3.0, **filtered(ratio_high=2.0)}, "aipo_rho", {"aipo_rho": 1.5}),
    ],
)  # fmt: skip
def test_a_key_that_another_overrules_is_refused(settings: dict[str, Any], path: str, remedy: dict[str, Any]):
    assert paths(settings) == [path]
    assert paths(settings | remedy) == []
