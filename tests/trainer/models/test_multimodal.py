"""Multimodal models are trained on text, with all of their weights in checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from offbeat.services.generation.checkpoint_names import STACKED_EXPERTS, checkpoint_tensors
from offbeat.services.messages.types import PromptImage
from offbeat.trainer.config.actor_train import ModelArgs, TrainingArgs
from offbeat.trainer.engines.param_groups import parameter_groups
from offbeat.trainer.models.export import export_weights
from offbeat.trainer.models.loading import load_critic, load_policy, load_reward_model
from offbeat.trainer.models.lora import merged_weights
from offbeat.trainer.models.multimodal import TRAINED_ON_TEXT, towers
from offbeat.trainer.models.policy import PackedPolicy
from tests.copying import replace
from tests.families import pack, write_multimodal

LENGTHS = (150, 40, 2, 70, 7, 129, 64)


@pytest.fixture
def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 64, (length,), generator=generator) for length in LENGTHS]  # with images' placeholders


def randomize(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)


def load(folder: Path, family: str, **args: Any) -> PackedPolicy:
    write_multimodal(folder, family, max_position_embeddings=256)
    policy = load_policy(folder, ModelArgs(**args), seed=0)
    randomize(policy)
    return policy


@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager"])
@pytest.mark.parametrize("family", TRAINED_ON_TEXT)
def test_text_is_computed_as_by_transformers(
    family: str, attention: str, tmp_path: Path, sequences: list[Tensor]
) -> None:
    policy = load(tmp_path, family, attn_implementation=attention).eval()
    assert type(policy) is PackedPolicy
    plain = AutoModelForImageTextToText.from_config(policy.model.config, dtype=torch.float32)
    plain.load_state_dict(policy.model.state_dict())
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        rows = [plain.eval()(tokens[None], use_cache=False).logits[0].log_softmax(-1) for tokens in sequences]
        expected = [row[:-1].gather(1, tokens[1:, None])[:, 0] for row, tokens in zip(rows, sequences, strict=True)]
        torch.testing.assert_close(policy(pack(sequences)).logprobs, torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", TRAINED_ON_TEXT)
def test_the_language_model_alone_is_trained(family: str, tmp_path: Path, sequences: list[Tensor]) -> None:
    policy = load(tmp_path, family, disable_gradient_checkpointing=False).train()
    frozen = {id(parameter) for tower in towers(policy.model) for parameter in tower.parameters()}
    assert len(frozen) > 5
    policy(pack(sequences)).logprobs.square().sum().backward()
    for name, parameter in policy.named_parameters():
        assert (parameter.grad is None) == (id(parameter) in frozen), name
    grouped = [parameter for group in parameter_groups(policy, TrainingArgs()).values() for parameter in group]
    assert not frozen & {id(parameter) for parameter in grouped}


@pytest.mark.parametrize("family", TRAINED_ON_TEXT)
def test_exported_weights_are_those_of_a_whole_checkpoint(family: str, tmp_path: Path) -> None:
    policy = load(tmp_path, family)
    weights = {weight.name.removeprefix("model."): weight.tensor() for weight in merged_weights(policy)}
    export_weights(tmp_path, checkpoint_tensors(policy.model.config, weights.items()))
    auto: Any = AutoModelForImageTextToText
    again, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    loaded = dict(again.named_parameters())
    assert all(torch.equal(parameter, loaded[name]) for name, parameter in policy.model.named_parameters())


def test_experts_are_exported_as_published_ones(tmp_path: Path) -> None:
    """Of what has a checkpoint's layout already, nothing is exchanged, and what nobody could tell apart is refused."""
    policy = load(tmp_path, "qwen3_vl_moe")
    weights = {name: parameter.detach() for name, parameter in policy.model.named_parameters()}
    written = dict(checkpoint_tensors(policy.model.config, weights.items()))
    (gate, down) = (f"model.language_model.layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
    assert (written[gate].shape, written[down].shape) == ((4, 64, 96), (4, 48, 64))
    for name, tensor in checkpoint_tensors(policy.model.config, written.items()):
        assert torch.equal(tensor, written[name])
        assert torch.equal(tensor.transpose(1, 2) if name.endswith(STACKED_EXPERTS) else tensor, weights[name])
    write_multimodal(tmp_path / "square", "qwen3_vl_moe", moe_intermediate_size=32)
    with pytest.raises(ValueError, match="hidden_size 64 and moe_intermediate_size 32 do not tell apart"):
        load_policy(tmp_path / "square", ModelArgs(), seed=0)


def test_router_weights_that_only_transformers_normalizes_are_refused(tmp_path: Path) -> None:
    write_multimodal(tmp_path, "qwen3_vl_moe", norm_topk_prob=False)
    with pytest.raises(ValueError, match="set norm_topk_prob to true"):
        load_policy(tmp_path, ModelArgs(), seed=0)


@pytest.mark.parametrize("target", ["all-linear", "q_proj,v_proj"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl_moe", "gemma3"])
def test_towers_take_no_adapters(family: str, target: str, tmp_path: Path, sequences: list[Tensor]) -> None:
    # Gemma 3's encoder of images has layers of the same names
    policy = load(tmp_path, family, lora_target=target, lora_rank=4).train()
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("language_model" in name and ".lora_" in name for name in trained)
    policy(pack(sequences)).logprobs.sum().backward()
    assert all(parameter.grad is not None for parameter in policy.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl", "gemma3", "mistral3"])
def test_critics_and_reward_models_are_trained_on_text(family: str, tmp_path: Path, sequences: list[Tensor]) -> None:
    write_multimodal(tmp_path, family, max_position_embeddings=256)
    critic = load_critic(tmp_path, ModelArgs(), seed=0).eval()
    randomize(critic)
    assert not any(parameter.requires_grad for tower in towers(critic.model) for parameter in tower.parameters())
    with torch.no_grad():
        expected = torch.cat([critic(pack([tokens])) for tokens in sequences])
        torch.testing.assert_close(critic(pack(sequences)), expected, rtol=1e-4, atol=1e-4)


def test_images_are_refused(tmp_path: Path, sequences: list[Tensor]) -> None:
    policy = load(tmp_path, "qwen3_5")
    with pytest.raises(ValueError, match=r"no image input: set .*model_args.image_input to true"):
        policy(replace(pack(sequences), images=(PromptImage(start=3, count=4, png=b""),)))


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
def test_a_reward_model_of_a_multimodal_one(family: str, tmp_path: Path, sequences: list[Tensor]) -> None:
    write_multimodal(tmp_path, family, max_position_embeddings=256)
    reward_model = load_reward_model(tmp_path, ModelArgs(), seed=0).eval()
    randomize(reward_model)
    with torch.no_grad():
        expected = torch.cat([reward_model(pack([tokens])) for tokens in sequences])
        torch.testing.assert_close(reward_model(pack(sequences)), expected, rtol=1e-4, atol=1e-4)
