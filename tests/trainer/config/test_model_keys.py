"""No key of a critic or of a model's arguments is silent: each changes what is computed or trained."""

from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.config.roles import CriticConfig, CriticModelArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_critic, load_policy
from offbeat.trainer.models.quantization import quantized_layers
from offbeat.trainer.models.tiny import write_tiny_policy
from offbeat.trainer.training.optimizer_step import BatchTrainer, StepModels
from tests.fakes import make_group, train_on
from tests.trainer.config.key_effects import Change
from tests.trainer.data.test_prefix_trees import ragged
from tests.trainer.plain_engine import PlainEngine

HEAD: dict[str, Any] = {"backbone": "policy"}
OF_THE_CRITIC: dict[str, Change] = {
    "backbone": ({}, HEAD),
    "vf_coef": (HEAD, {"vf_coef": 0.9}),
    "learning_rate": ({}, {"training_args": {"learning_rate": 1e-2}}),
    "learning_rate of a head": (HEAD, {"training_args": {"learning_rate": 1e-2}}),
    "warmup_steps": ({}, {"training_args": {"warmup_steps": 5}}),
    "warmup_steps of a head": (HEAD, {"training_args": {"warmup_steps": 5}}),
    "dtype": ({}, {"model_args": {"dtype": "bfloat16"}}),
}


LORA: dict[str, Any] = {"lora_target": "q_proj,v_proj"}
FOUR_BITS = LORA | {"load_in_4bit": True}
OF_THE_ROLES: dict[str, object] = {
    "dtype": "bfloat16",
    "attn_implementation": "eager",
    "disable_gradient_checkpointing": False,
}
OF_THE_MODEL: dict[str, Change] = {
    "dtype": ({}, {"dtype": "bfloat16"}),
    "attn_implementation": ({}, {"attn_implementation": "eager"}),
    "shared_prefix": ({}, {"shared_prefix": True}),
    "disable_gradient_checkpointing": ({}, {"disable_gradient_checkpointing": False}),
    "lora_target": ({}, LORA),
    "lora_rank": (LORA | {"lora_alpha": 8.0}, {"lora_rank": 4}),
    "lora_alpha": (LORA, {"lora_alpha": 4.0}),
    "use_rslora": (LORA, {"use_rslora": True}),
    "load_in_4bit": (LORA, {"load_in_4bit": True}),
    "bnb_4bit_quant_type": (FOUR_BITS, {"bnb_4bit_quant_type": "fp4"}),
    "use_bnb_nested_quant": (FOUR_BITS, {"use_bnb_nested_quant": True}),
}
"""What is computed, with what, and which weights are trained."""


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
    batches = BatchTrainer(config, StepModels(PlainEngine(policy)), Ranks(0, 0, 1, torch.device("cpu")))
    gauges = train_on(batches, ragged(), 0)
    return {
        "trained": {name: each.shape for name, each in policy.named_parameters() if each.requires_grad},
        "dtype": model.dtype,
        "attention": model.config._attn_implementation,
        "checkpointing": model.is_gradient_checkpointing,
        "scales": [each.scaling for each in model.modules() if hasattr(each, "scaling") and hasattr(each, "lora_A")],
        "quantized": [layer.weight.tolist() for layer in quantized_layers(policy)],
        "bytes": sum(buffer.nbytes for layer in quantized_layers(policy) for buffer in layer.buffers()),
        "tokens": {name: each.value for name, each in gauges.items() if name.startswith("tokens/")},
    }


def trained(folder: Path, critic: dict[str, Any]) -> torch.Tensor:
    """The policy, and what says its values, after two steps."""
    training = {"training_args": {"learning_rate": 1e-2, "max_tokens_per_microbatch": 1000}}
    config = LearnerConfig.model_validate({"adv_estimator": "gae", "critic": critic, "actor_train": training})
    policy = load_policy(folder, ModelArgs(), seed=1, value_head=config.has_value_head)
    own = load_critic(folder, ModelArgs().of_role(config.critic.model_args), seed=1) if config.has_own_critic else None
    models = StepModels(PlainEngine(policy), None if own is None else PlainEngine(own))
    batches = BatchTrainer(config, models, Ranks(0, 0, 1, torch.device("cpu")))
    for step in range(2):
        train_on(batches, [make_group(n, rewards=(0.0, 1.0, 0.5)) for n in range(2)], step)
    head = policy.value_head if own is None else own.value_head
    assert head is not None
    return torch.cat([each.detach().flatten() for each in (*policy.model.parameters(), *head.parameters())])


@pytest.mark.parametrize(("key", "value"), OF_THE_ROLES.items(), ids=OF_THE_ROLES)
def test_a_role_has_the_policys_model_but_for_its_own_keys(key: str, value: object) -> None:
    args = ModelArgs(dtype="float32", lora_target="all-linear", attn_implementation="sdpa")
    assert args.of_role(CriticModelArgs()) == args.without_adapters
    assert args.of_role(CriticModelArgs(**{key: value})) == args.without_adapters.model_copy(update={key: value})


def test_every_key_of_a_critic_and_a_model_has_an_effect_that_is_shown():
    shown = {key for _, change in OF_THE_CRITIC.values() for key in change}
    elsewhere = {
        "infer_batch_size",
        "device_mapping",
        "num_processes",
    }  # training/test_batch_sizes.py, deploy/config/test_device_plan.py
    assert set(CriticConfig.model_fields) == shown | elsewhere
    with_files = {
        "adapter_name_or_path",
        "image_input",
    }  # trainer/models/test_initial_adapter.py, trainer/models/test_vision.py
    assert set(ModelArgs.model_fields) == {*OF_THE_MODEL, *with_files}
    of_the_folder = {"model_name_or_path", "model_type"}  # trainer/models/test_critic_head.py
    assert set(CriticModelArgs.model_fields) == {*of_the_folder, *OF_THE_ROLES}
