import pytest
from pydantic import ValidationError

from offbeat.services.generation.config import EngineStrategy
from offbeat.trainer.checks.learner import check_learner
from offbeat.trainer.config.actor_train import StrategyArgs
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.config.rewards import RewardNormalization
from offbeat.trainer.config.roles import InferStrategyArgs
from offbeat.trainer.config.scored_roles import scored_roles


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"reward_normalization": RewardNormalization(method="identity")}, "reward_normalization"),
        ({"pg_variant": "tis", "pg_clip_low": 0.1}, "pg_clip_low"),
        ({"pg_variant": "tis", "pg_clip_high": 0.1}, "pg_clip_high"),
        ({"pg_variant": "tis", "dual_clip": 3.0}, "dual_clip"),
        ({"kl_loss_coef": 0.1}, "kl_loss_coef"),
        ({"init_kl_coef": 0.1, "add_token_level_kl": False}, "add_token_level_kl"),
        ({"target_kl": 0.1, "adv_estimator": "gigpo"}, "target_kl"),
        ({"value_clip": 0.1}, "value_clip"),
    ],
)
def test_key_without_effect_is_rejected_by_path(settings: dict, path: str):
    with pytest.raises(ValidationError) as refused:
        AlgorithmConfig(**settings)
    assert [error["loc"] for error in refused.value.errors()] == [(path,)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pg_variant": "tis", "tis_upper_bound": 4.0},
        {"adv_estimator": "reinforce", "reward_normalization": RewardNormalization(method="identity")},
        {"pg_clip_low": 0.1, "pg_clip_high": 0.3, "dual_clip": 3.0},
        {"use_kl_loss": True, "kl_loss_coef": 0.1},
        {"add_token_level_kl": True, "init_kl_coef": 0.1, "target_kl": 0.05},
        {"adv_estimator": "gae", "value_clip": 0.2},
    ],
)
def test_effective_keys_are_accepted_and_round_trip(settings: dict):
    config = AlgorithmConfig(**settings)
    assert AlgorithmConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("estimator", "method"), [("grpo", "mean_std"), ("reinforce", "identity"), ("gae", "identity")]
)
def test_estimator_has_a_default_reward_method(estimator: str, method: str):
    assert AlgorithmConfig(adv_estimator=estimator).reward_method == method
    given = AlgorithmConfig(adv_estimator=estimator, reward_normalization=RewardNormalization(method="mean"))
    assert given.reward_method == "mean"


@pytest.mark.parametrize("name", ["fsdp2_infer", "hf_infer", "deepspeed_infer"])
def test_unsupported_training_strategy_is_rejected_with_alternative(name: str):
    with pytest.raises(ValidationError, match="deepspeed_train"):
        StrategyArgs.model_validate({"strategy_name": name})


@pytest.mark.parametrize("name", ["megatron_infer", "fsdp2_infer", "sglang"])
def test_unsupported_inference_strategy_is_rejected_with_alternative(name: str):
    with pytest.raises(ValidationError, match="take hf_infer or deepspeed_infer"):
        InferStrategyArgs.model_validate({"strategy_name": name})


@pytest.mark.parametrize("name", ["fsdp2_infer", "megatron_infer", "deepspeed_infer"])
def test_unsupported_engine_is_rejected_with_alternative(name: str):
    with pytest.raises(ValidationError, match=rf"{name} can't sample \(.*\): take vllm, hf_infer or sglang"):
        EngineStrategy.model_validate({"strategy_name": name})


SHARDED = {"reference": {"strategy_args": {"strategy_name": "deepspeed_infer"}}}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
KL_REWARD = {"add_token_level_kl": True, "init_kl_coef": 0.1}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "the reference is not used"),
        ({**KL, "kl_loss_type": "full"}, "kl_loss_type full"),
        ({**KL_REWARD, "kl_penalty": "full", "old_logprobs": "recompute"}, "kl_penalty full"),
        ({**KL, "ref_model_sync_steps": 2}, "can't update"),
        ({**KL, "actor_train": {"model_args": {"lora_target": "all-linear"}}}, "without its adapters"),
    ],
)
def test_sharded_reference_rejects_unsupported_features(settings: dict, why: str):
    found = list(check_learner(LearnerConfig.model_validate({**SHARDED, **settings})))
    assert [(each.path, why in each.message) for each in found] == [("reference.strategy_args.strategy_name", True)]
    assert not list(check_learner(LearnerConfig.model_validate({**SHARDED, **KL})))


LORA = {"lora_target": "q_proj"}


@pytest.mark.parametrize(
    ("model_args", "says"),
    [
        (LORA, "with lora_target the reference is the policy without its adapters"),
        (
            {**LORA, "adapter_name_or_path": "sft"},
            "with adapter_name_or_path the reference is the policy with that adapter",
        ),
    ],
)
@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (SHARDED, "reference.strategy_args.strategy_name"),
        ({"ref_model_sync_steps": 2}, "ref_model_sync_steps"),
        ({"reference": {"model_args": {"dtype": "bfloat16"}}}, "reference.model_args.dtype"),
    ],
)
def test_a_policy_with_adapters_is_its_own_reference(settings: dict, key: str, model_args: dict, says: str):
    tree = {**KL, **settings, "actor_train": {"model_args": model_args}}
    (issue,) = check_learner(LearnerConfig.model_validate(tree))
    assert issue.path == key
    assert issue.message.startswith(says)


BESIDE = {"reference": {"strategy_args": {"placement": "service"}}}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "the reference is not used"),
        ({**KL, "kl_loss_type": "full"}, "needs all of the vocabulary: take k3"),
        ({**KL_REWARD, "kl_penalty": "full", "old_logprobs": "recompute"}, "needs all of the vocabulary"),
        ({**KL, "ref_model_sync_steps": 2}, "changes the reference between steps"),
    ],
)
def test_a_reference_beside_the_learner_rejects_unsupported_features(settings: dict, why: str):
    found = list(check_learner(LearnerConfig.model_validate({**BESIDE, **settings})))
    assert [(each.path, why in each.message) for each in found] == [("reference.strategy_args.placement", True)]
    assert not list(check_learner(LearnerConfig.model_validate({**BESIDE, **KL})))


@pytest.mark.parametrize(
    ("strategy", "replicas"),
    [
        ({"strategy_name": "hf_infer"}, []),
        ({"strategy_name": "hf_infer", "placement": "service"}, [1]),
        ({"strategy_name": "hf_infer", "placement": "service", "num_replicas": 2}, [2]),
    ],
)
def test_hf_infer_is_the_frozen_model_in_the_learner_or_its_service(strategy: dict, replicas: list[int]):
    config = LearnerConfig.model_validate({**KL, "reference": {"strategy_args": strategy}})
    assert not list(check_learner(config))
    assert [role.num_replicas for role in scored_roles(config, config.reference)] == replicas


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ({"strategy_name": "deepspeed_infer", "placement": "service"}, "holds the whole model: take hf_infer"),
        ({"num_replicas": 2}, "take placement=service"),
    ],
)
def test_settings_of_a_service_without_effect_are_rejected(strategy: dict, why: str):
    with pytest.raises(ValidationError, match=why):
        InferStrategyArgs.model_validate(strategy)


@pytest.mark.parametrize(
    ("keys", "coefficient", "penalizes"),
    [
        ({}, 0.0, False),
        ({"init_kl_coef": 0.05}, 0.05, True),
        ({"target_kl": 0.1}, 0.2, True),
        ({"target_kl": 0.1, "init_kl_coef": 0.3}, 0.3, True),
        ({"init_kl_coef": 0.0, "add_token_level_kl": False}, 0.0, False),
    ],
)
def test_the_kl_penalty_follows_from_its_coefficient_or_target(
    keys: dict[str, float], coefficient: float, penalizes: bool
):
    config = AlgorithmConfig.model_validate(keys)
    assert (config.init_kl_coef, config.add_token_level_kl, config.needs_reference) == (
        coefficient,
        penalizes,
        penalizes,
    )
    assert AlgorithmConfig.model_validate_json(config.model_dump_json()) == config
