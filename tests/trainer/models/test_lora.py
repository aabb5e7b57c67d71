"""LoRA: training, export, policy without adapters."""

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.data.batch import microbatches, pack
from offbeat.trainer.engines.frozen import FirstPolicyReference
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.initial_adapter import with_initial_adapters
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.lora import adapted_layers, merged_weights, save_adapter
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.policy import PackedPolicy
from offbeat.trainer.training.optimizer_step import BatchTrainer, StepModels
from tests.fakes import make_group, train_on
from tests.families import write_family
from tests.trainer.plain_engine import PlainEngine

GROUPS = [make_group(n, rewards=(0.0, 1.0, 1.0, 0.5)) for n in range(3)]
ALONE = Ranks(0, 0, 1, torch.device("cpu"))
QV = ModelArgs(lora_target="q_proj, v_proj", lora_rank=3, lora_alpha=5.0)


def trained(folder: Path, args: ModelArgs, steps: int = 3) -> tuple[PackedPolicy, PlainEngine]:
    policy = load_policy(folder, args, seed=1)
    engine = PlainEngine(policy)
    settings = {"actor_train": {"training_args": {"learning_rate": 1e-2}}}
    batches = BatchTrainer(LearnerConfig.model_validate(settings), StepModels(engine), ALONE)
    for step in range(steps):
        train_on(batches, GROUPS, step)
    return policy, engine


def logprobs_of(policy: PackedPolicy) -> Tensor:
    batch = pack(GROUPS)
    (micro,) = microbatches(batch, range(batch.num_sequences), 10_000)
    with torch.no_grad():
        return policy(PackedInput.of(micro.tokens, micro.cu_seqlens, micro.positions)).logprobs


def published(policy: PackedPolicy) -> dict[str, Tensor]:
    return {weight.name.removeprefix("model."): weight.tensor().clone() for weight in merged_weights(policy)}


def test_a_fresh_adapter_changes_nothing(folder: Path) -> None:
    plain, adapted = load_policy(folder, ModelArgs(), seed=1), load_policy(folder, QV, seed=1)
    assert torch.equal(logprobs_of(plain), logprobs_of(adapted))
    one, two = published(plain), published(adapted)
    assert list(one) == list(two)
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_only_adapters_change(folder: Path) -> None:
    before = load_policy(folder, QV, seed=1).state_dict()
    policy, _ = trained(folder, QV)
    changed = {name for name, tensor in policy.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if ".lora_" in name}
    assert len(changed) == 2 * 2 * 2  # layers, targets, A and B


def test_unmerged_weights_have_pefts_names_and_give_the_merged_ones(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM

    start = published(load_policy(folder, ModelArgs(), seed=1))
    policy, engine = trained(folder, QV)
    parts = dict(engine.tensors("parts"))
    base = {name: tensor for name, tensor in parts.items() if name in start}
    assert base.keys() == start.keys()
    assert all(torch.equal(tensor, base[name]) for name, tensor in start.items())
    config = LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"])
    theirs = get_peft_model(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)), config)
    assert parts.keys() - base.keys() == get_peft_model_state_dict(theirs).keys()
    for name, merged in published(policy).items():
        path = f"base_model.model.{name}".removesuffix(".weight")
        if f"{path}.lora_A.weight" in parts:
            product = parts[f"{path}.lora_B.weight"] @ parts[f"{path}.lora_A.weight"]
            torch.testing.assert_close(merged, base[name] + 5.0 / 3 * product)
        else:
            assert torch.equal(merged, base[name])


def test_published_weights_are_the_base_and_the_scaled_product(folder: Path) -> None:
    policy, engine = trained(folder, QV)
    state = policy.state_dict()
    for name, tensor in engine.tensors():
        owner = f"model.{name}".removesuffix(".weight")
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            product = state[f"{owner}.lora_B.default.weight"] @ state[f"{owner}.lora_A.default.weight"]
            torch.testing.assert_close(tensor, state[f"{owner}.base_layer.weight"] + 5.0 / 3 * product)
        elif name.endswith(("q_proj.bias", "v_proj.bias")):
            assert torch.equal(tensor, state[f"model.{name}".replace("_proj", "_proj.base_layer")])
        else:
            assert torch.equal(tensor, state[f"model.{name}"])


def test_model_of_the_merged_weights_has_equal_logprobs(folder: Path) -> None:
    policy, engine = trained(folder, ModelArgs(lora_target="all-linear"))
    twin = load_policy(folder, ModelArgs(), seed=9)
    twin.model.load_state_dict(dict(engine.tensors()), strict=False)
    torch.testing.assert_close(logprobs_of(twin), logprobs_of(policy), rtol=0, atol=1e-5)
    assert not torch.allclose(logprobs_of(twin), logprobs_of(load_policy(folder, ModelArgs(), seed=1)), atol=1e-2)


def test_disabling_a_trained_adapter_restores_the_base_policy(folder: Path) -> None:
    policy, engine = trained(folder, QV)
    start = logprobs_of(load_policy(folder, ModelArgs(), seed=1))
    with with_initial_adapters(policy):
        assert torch.equal(logprobs_of(policy), start)
    assert not torch.allclose(logprobs_of(policy), start, atol=1e-3)
    batch = pack(GROUPS)
    (micro,) = microbatches(batch, range(batch.num_sequences), 10_000)
    x = PackedInput.of(micro.tokens, micro.cu_seqlens, micro.positions)
    assert torch.equal(FirstPolicyReference(engine, policy).infer([x])[0], start)
    assert all(p.requires_grad == (".lora_" in name) for name, p in policy.named_parameters())


def test_alpha_defaults_to_twice_the_rank(folder: Path) -> None:
    args = QV.model_copy(update={"lora_alpha": None})
    layer = load_policy(folder, args, seed=1).get_submodule("model.model.layers.0.self_attn.q_proj")
    assert layer.scaling == {"default": 2.0}


def test_the_adapters_start_depends_on_the_seed_alone(folder: Path) -> None:
    one, same, other = (load_policy(folder, QV, seed=seed).state_dict() for seed in (1, 1, 2))
    name = "model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])


@pytest.mark.parametrize(
    ("target", "message"), [("nothing", "nothing"), ("embed_tokens", "not a linear layer"), ("lm_head", "unshared")]
)
def test_a_layer_without_adapter_support_is_refused_by_name(folder: Path, target: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_policy(folder, ModelArgs(lora_target=target), seed=1)


ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}
LATENT = {f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}
DENSE = {f"mlp.{middle}{name}_proj" for middle in ("", "shared_experts.") for name in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("qwen3_moe", ATTENTION),
        ("mixtral", ATTENTION),
        ("granitemoe", ATTENTION),
        ("glm4_moe", ATTENTION | DENSE),
        ("deepseek_v3", LATENT | DENSE),
    ],
)
def test_all_linear_adapts_a_mixture_of_experts_but_not_its_experts(
    family: str, layers: set[str], tmp_path: Path
) -> None:
    """PEFT would map the names of dense layers to the stacked experts, which can't be merged."""
    write_family(tmp_path, family)
    args = ModelArgs(lora_target="all-linear", lora_rank=2)
    policy = load_policy(tmp_path, args, seed=1)
    assert {name.split(".", 4)[-1] for name in adapted_layers(policy)} == layers
    plain = published(load_policy(tmp_path, ModelArgs(), seed=1))
    assert plain.keys() == published(policy).keys()
    named = load_policy(tmp_path, ModelArgs(lora_target="o_proj"), seed=1)
    assert {name.rpartition(".")[2] for name in adapted_layers(named)} == {"o_proj"}


@pytest.mark.parametrize("target", ["experts", "gate"])
def test_stacked_experts_and_routers_are_refused_by_name(target: str, tmp_path: Path) -> None:
    write_family(tmp_path, "qwen3_moe")
    with pytest.raises(
        ValueError, match=rf"names model.layers.0.mlp.{target}, which is not a linear layer.*stacked experts"
    ):
        load_policy(tmp_path, ModelArgs(lora_target=target), seed=1)


def test_a_model_without_linear_layers_is_not_told_to_set_all_linear(tmp_path: Path) -> None:
    """GPT-2 has layers of a class of its own, whose weights are transposed."""
    write_family(tmp_path, "gpt2")
    with pytest.raises(ValueError, match=r"has no torch.nn.Linear: leave it out"):
        load_policy(tmp_path, ModelArgs(lora_target="all-linear"), seed=1)


def test_a_rank_without_a_target_is_refused() -> None:
    with pytest.raises(ValidationError, match="lora_target"):
        ModelArgs(lora_rank=4)


def test_a_saved_adapters_settings_do_not_depend_on_the_process(tmp_path: Path) -> None:
    """PEFT keeps the names in a set, whose order is drawn per process."""
    names = [f"{name}_proj" for name in ("down", "gate", "k", "o", "q", "up", "v")]
    factors = {f"base_model.model.layers.0.{name}.lora_A.weight": torch.zeros(3, 2) for name in reversed(names)}
    save_adapter(tmp_path / "adapter", factors, QV, tmp_path)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"] == names
