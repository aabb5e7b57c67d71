"""No key of an algorithm, a model, the replay or the staleness controller is silent: each changes what is trained or
done, or is refused where it would not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from services.schema import Group
from tests.fakes import make_group
from tests.trainer.outcome import outcome
from tests.trainer.plain_engine import PlainEngine
from tests.trainer.test_families import ragged
from tests.trainer.test_replay import numbers, replayed
from tests.trainer.test_staleness import Seen, asked
from trainer.algorithm_config import AlgorithmConfig
from trainer.config import CriticConfig, LearnerConfig, ModelArgs, TinyPolicyConfig
from trainer.correction_config import ImportanceWeight, MismatchFilter, TrainInferCorrection
from trainer.distillation_config import TeacherConfig
from trainer.engines.processes import Ranks
from trainer.models.policy import load_critic, load_policy
from trainer.policies.tiny import write_tiny_policy
from trainer.replay_config import ReplayConfig
from trainer.reward_config import RewardNormalization, RewardShaping
from trainer.staleness_config import StalenessControllerConfig
from trainer.step import BatchTrainer, Models

HERE = f"{__name__}:OddGroups"
RECOMPUTE = {"old_logprobs": "recompute"}
GAE = {"adv_estimator": "gae"}
KL_LOSS = {"use_kl_loss": True, "kl_loss_coef": 0.3}
KL_REWARD = {"add_token_level_kl": True, "init_kl_coef": 0.3}
ALL = {"zero_variance": "train"}

Change = tuple[dict[str, Any], dict[str, Any]]
"""A configuration, and what is changed in it."""


def teachers(**told: dict[str, Any]) -> dict[str, Any]:
    return {"teacher": {name: TeacherConfig(pretrain=name, **settings) for name, settings in told.items()}}


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
            "remax",
            "gigpo",
            "step_reinforce",
            "agentic_reinforce",
        )
    ]
    + [(ALL | TEACHERS, {"adv_estimator": "opd"})],
    "gae_level": [(GAE, {"gae_level": "turn"})],
    "value_targets": [(GAE | RECOMPUTE, {"value_targets": "vtrace"})],
    "vtrace_rho_bar": [(GAE | RECOMPUTE | {"value_targets": "vtrace"}, {"vtrace_rho_bar": 1.1})],
    "vtrace_c_bar": [(GAE | RECOMPUTE | {"value_targets": "vtrace"}, {"vtrace_c_bar": 0.8})],
    "gamma": [({}, {"gamma": 0.9}), (GAE, {"gamma": 0.9}), ({"adv_estimator": "agentic_reinforce"}, {"gamma": 0.9})],
    "lambd": [(GAE, {"lambd": 0.5}), (GAE | {"gae_level": "turn"}, {"lambd": 0.5})],
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
    "advantage_clip": [({}, {"advantage_clip": 0.1})],
    "zero_variance": [({}, ALL)],
    "group_filter_cls": [({}, {"group_filter_cls": HERE})],
    "difficulty_mask": [({}, {"difficulty_mask": True, "difficulty_low_threshold": 0.6})],
    "difficulty_low_threshold": [({"difficulty_mask": True}, {"difficulty_low_threshold": 0.6})],
    "difficulty_high_threshold": [({"difficulty_mask": True}, {"difficulty_high_threshold": 0.6})],
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
    "ref_model_mixup_alpha",
}  # fmt: skip
"""Shown by tests/trainer/test_step.py."""
OF_THE_ENGINE = {"pretrain", "strategy_args"}
"""Of a teacher: which model, and how it lies on processes (tests/integration/test_learner_engine.py)."""


def normalized(**told: Any) -> dict[str, Any]:
    return {"reward_normalization": RewardNormalization(**told)}


def shaping(**told: Any) -> dict[str, Any]:
    return {"reward_shaping": RewardShaping(**told)}


def corrected(*filters: MismatchFilter, **told: Any) -> dict[str, Any]:
    return {"train_infer_correction": TrainInferCorrection(filters=filters, **told)}


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


HEAD: dict[str, Any] = {"backbone": "policy"}
OF_THE_CRITIC: dict[str, Change] = {
    "backbone": ({}, HEAD),
    "vf_coef": (HEAD, {"vf_coef": 0.9}),
    "learning_rate": ({}, {"learning_rate": 1e-2}),
    "learning_rate of a head": (HEAD, {"learning_rate": 1e-2}),
    "warmup_steps": ({}, {"warmup_steps": 5}),
    "warmup_steps of a head": (HEAD, {"warmup_steps": 5}),
}


LORA: dict[str, Any] = {"lora_target": "q_proj,v_proj"}
OF_THE_MODEL: dict[str, Change] = {
    "dtype": ({}, {"dtype": "bfloat16"}),
    "attn_implementation": ({}, {"attn_implementation": "eager"}),
    "shared_prefix": ({}, {"shared_prefix": True}),
    "disable_gradient_checkpointing": ({}, {"disable_gradient_checkpointing": False}),
    "lora_target": ({}, LORA),
    "lora_rank": (LORA | {"lora_alpha": 8.0}, {"lora_rank": 4}),
    "lora_alpha": (LORA, {"lora_alpha": 4.0}),
}
"""What is computed, with what, and which weights are trained."""

TWICE: dict[str, Any] = {"samples_per_insert": 2.0}
PRIORITIZED = TWICE | {"sampler": "prioritized"}
OF_THE_REPLAY: dict[str, list[Change]] = {
    "samples_per_insert": [({}, TWICE), (TWICE, {"samples_per_insert": 1.5})],
    "max_times_sampled": [({"samples_per_insert": 3.0}, {"max_times_sampled": 3})],
    "max_size": [(TWICE, {"max_size": 5})],
    "max_staleness": [(TWICE, {"max_staleness": 1.0})],
    "sampler": [(TWICE, {"sampler": name}) for name in ("fifo", "lifo", "prioritized")],
    "priority_exponent": [(PRIORITIZED, {"priority_exponent": 2.0})],
    "importance_sampling_exponent": [(PRIORITIZED, {"importance_sampling_exponent": 1.0})],
}

WELL = Seen(mismatch_kl=0.0, ess=1.0, wait_s=0.0, playing=24)
TOO_OLD, WAITS = WELL._replace(mismatch_kl=1.0), WELL._replace(wait_s=0.5)
HELD_UP, IDLE = WAITS._replace(playing=12), WELL._replace(playing=12)
OF_THE_CONTROLLER: dict[str, tuple[Seen, Any]] = {
    "interval": (TOO_OLD, 2),
    "patience": (TOO_OLD, 1),
    "min_staleness": (TOO_OLD, 1.5),
    "max_staleness": (HELD_UP, 2.5),
    "staleness_step": (TOO_OLD, 0.5),
    "min_env_groups": (IDLE, 20),
    "max_env_groups": (WAITS, 40),
    "max_mismatch_kl": (WELL._replace(mismatch_kl=0.06), 0.1),
    "min_ess": (WELL._replace(ess=0.6), 0.5),
    "max_learner_idle": (HELD_UP, 0.6),
    "max_rollout_idle": (HELD_UP, 0.6),
    "hysteresis": (HELD_UP._replace(mismatch_kl=0.04), 0.0),
}
"""What steps measure, and a value that makes the controller do something else than without it."""


class OddGroups:
    def __call__(self, group: Group) -> bool:
        return group.number % 2 == 1


CASES = [
    pytest.param(base, change, id=f"{key}-{n}")
    for key, changes in (EFFECTS | NESTED).items()
    for n, (base, change) in enumerate(changes)
]


@pytest.mark.parametrize(("base", "change"), CASES)
def test_a_key_changes_what_is_trained(base: dict[str, Any], change: dict[str, Any]):
    before, after = outcome(AlgorithmConfig(**base)), outcome(AlgorithmConfig(**base | change))
    one, two = before.numbers(), after.numbers()
    assert torch.isfinite(two).all()
    assert one.shape != two.shape or not torch.allclose(one, two, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("critic", "more"), OF_THE_CRITIC.values(), ids=OF_THE_CRITIC)
def test_a_key_of_the_critic_changes_what_is_trained(critic: dict[str, Any], more: dict[str, Any], tmp_path: Path):
    write_tiny_policy(tmp_path, TinyPolicyConfig(num_hidden_layers=1), ["a", "b", "c", "d"])
    before, after = (trained(tmp_path, each) for each in (critic, critic | more))
    assert torch.isfinite(after).all()
    assert not torch.allclose(before, after, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("args", "more"), OF_THE_MODEL.values(), ids=OF_THE_MODEL)
def test_a_key_of_the_model_changes_what_is_computed_or_trained(
    args: dict[str, Any], more: dict[str, Any], tmp_path: Path
):
    write_tiny_policy(tmp_path, TinyPolicyConfig(num_hidden_layers=1), ["a", "b", "c", "d"])
    assert made(tmp_path, args) != made(tmp_path, args | more)


def made(folder: Path, args: dict[str, Any]) -> dict[str, Any]:
    """The policy that `model_args` make, and the tokens that a step computes."""
    training = {"training_args": {"max_tokens_per_microbatch": 1000}, "model_args": args}
    config = LearnerConfig.model_validate({"actor_train": training})
    policy = load_policy(folder, config.actor_train.model_args, seed=1)
    model: Any = policy.model
    batches = BatchTrainer(config, Models(PlainEngine(policy)), Ranks(0, 0, 1, torch.device("cpu")))
    gauges = batches.train(ragged(), 0)
    return {
        "trained": {name: each.shape for name, each in policy.named_parameters() if each.requires_grad},
        "dtype": model.dtype,
        "attention": model.config._attn_implementation,
        "checkpointing": model.is_gradient_checkpointing,
        "scales": [each.scaling for each in model.modules() if hasattr(each, "scaling") and hasattr(each, "lora_A")],
        "tokens": {name: each.value for name, each in gauges.items() if name.startswith("tokens/")},
    }


@pytest.mark.parametrize(
    ("told", "more"),
    [pytest.param(*change, id=f"{key}-{n}") for key, all_ in OF_THE_REPLAY.items() for n, change in enumerate(all_)],
)
def test_a_key_of_the_replay_changes_which_groups_join_or_what_they_weigh(told: dict[str, Any], more: dict[str, Any]):
    before, after = (replayed(12, staleness=6, **each) for each in (told, told | more))
    assert [(numbers(each), each.weights) for each in before] != [(numbers(each), each.weights) for each in after]


@pytest.mark.parametrize(("key", "seen", "value"), [(key, *case) for key, case in OF_THE_CONTROLLER.items()])
def test_a_key_of_the_staleness_controller_changes_what_it_asks_for(key: str, seen: Seen, value: Any):
    assert asked(seen) != asked(seen, **{key: value})


def trained(folder: Path, critic: dict[str, Any]) -> torch.Tensor:
    """The policy, and what says its values, after two steps."""
    training = {"training_args": {"learning_rate": 1e-2, "max_tokens_per_microbatch": 1000}}
    config = LearnerConfig.model_validate({"adv_estimator": "gae", "critic": critic, "actor_train": training})
    policy = load_policy(folder, ModelArgs(), seed=1, value_head=config.has_value_head)
    own = load_critic(folder, ModelArgs(), seed=1) if config.has_own_critic else None
    models = Models(PlainEngine(policy), None if own is None else PlainEngine(own))
    batches = BatchTrainer(config, models, Ranks(0, 0, 1, torch.device("cpu")))
    for step in range(2):
        batches.train([make_group(n, rewards=(0.0, 1.0, 0.5)) for n in range(2)], step)
    head = policy.value_head if own is None else own.value_head
    assert head is not None
    return torch.cat([each.detach().flatten() for each in (*policy.model.parameters(), *head.parameters())])


def test_every_key_has_an_effect_that_is_shown():
    keys = set(AlgorithmConfig.model_fields)
    nested_teacher = {f"TeacherConfig.{name}" for name in TeacherConfig.model_fields if name not in OF_THE_ENGINE}
    tables = {"reward_normalization", "reward_shaping", "train_infer_correction"}
    assert keys == set(EFFECTS) | IN_THE_STEP | tables
    assert set(CriticConfig.model_fields) == {key for _, change in OF_THE_CRITIC.values() for key in change}
    assert set(ModelArgs.model_fields) == set(OF_THE_MODEL)
    assert set(ReplayConfig.model_fields) == set(OF_THE_REPLAY)
    assert set(StalenessControllerConfig.model_fields) == set(OF_THE_CONTROLLER)
    nested = {
        f"{table.__name__}.{name}"
        for table in (RewardNormalization, RewardShaping, TrainInferCorrection, ImportanceWeight, MismatchFilter)
        for name in table.model_fields
    }
    assert nested | nested_teacher == set(NESTED)


@pytest.mark.parametrize(
    ("settings", "path", "says"),
    [
        ({"adv_estimator": "remax"} | normalized(method="mean"), "reward_normalization", "its own way"),
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
        ({"adv_estimator": "rloo"} | normalized(method="mean"), "reward_normalization", "its own way"),
        ({"adv_estimator": "dr_grpo"} | normalized(method="mean_std"), "reward_normalization", "grpo"),
        ({"adv_estimator": "gigpo"} | normalized(grouping="batch"), "reward_normalization", "method alone"),
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
def test_a_key_without_effect_is_refused_by_its_path_with_what_would_be_right(settings: dict, path: str, says: str):
    with pytest.raises(ValidationError) as refused:
        AlgorithmConfig(**settings)
    assert [(error["loc"], says in error["msg"]) for error in refused.value.errors()] == [((path,), True)]


@pytest.mark.parametrize(
    ("table", "settings", "says"),
    [
        (RewardNormalization, {"method": "mean", "norm_std_type": "batch"}, "method"),
        (RewardShaping, {"overlong_buffer": 5}, "overlong_max_length"),
        (RewardShaping, {"format_metric": "x"}, "format_penalty"),
        (MismatchFilter, {}, "ratio_low"),
        (MismatchFilter, {"ratio_low": 2.0, "ratio_high": 1.0}, "not below"),
        (ImportanceWeight, {"lower_bound": 3.0}, "not below"),
    ],
)
def test_tables_refuse_what_would_do_nothing(table: type, settings: dict, says: str):
    with pytest.raises(ValidationError, match=says):
        table(**settings)


@pytest.mark.parametrize(("base", "change"), CASES)
def test_a_configuration_that_was_written_out_in_full_is_read_again(base: dict[str, Any], change: dict[str, Any]):
    config = AlgorithmConfig(**base | change)
    assert AlgorithmConfig.model_validate_json(config.model_dump_json()) == config
