"""Recurrent layers compute packed sequences as transformers does each alone, forward and backward."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from offbeat.services.generation.checkpoint_names import checkpoint_tensors
from offbeat.services.generation.config import AttentionName
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.models.limits import UNMASKED
from offbeat.trainer.models.loading import load_critic, load_policy, load_reward_model
from offbeat.trainer.models.lora import merged_weights
from offbeat.trainer.models.policy import PackedPolicy
from offbeat.trainer.models.recurrent_layers import RECURRENT_LAYERS, recurrent_layers
from tests.families import pack, write_family

LENGTHS = (150, 40, 2, 70, 7, 129, 1, 64)
"""Around multiples of the chunks of 64 tokens; the first one's bucket has padding."""
POSITIONS = {"max_position_embeddings": 256}


@pytest.fixture
def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 60, (length,), generator=generator) for length in LENGTHS]


def randomize(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)


def load(folder: Path, **args: Any) -> PackedPolicy:
    policy = load_policy(folder, ModelArgs(**args), seed=0)
    randomize(policy)
    return policy


def alone(policy: PackedPolicy, sequences: list[Tensor]) -> Tensor:
    """Return logprobs by transformers' own forward pass of each sequence."""
    packed = str(policy.model.config._attn_implementation)
    policy.model.set_attn_implementation("eager")
    each = [policy.model(tokens[None], use_cache=False).logits[0].log_softmax(-1) for tokens in sequences]
    policy.model.set_attn_implementation(packed)
    return torch.cat(
        [rows[:-1].gather(1, tokens[1:, None])[:, 0] for rows, tokens in zip(each, sequences, strict=True)]
    )


@pytest.mark.parametrize("family", RECURRENT_LAYERS)
def test_packed_sequences_are_computed_as_alone(family: str, tmp_path: Path, sequences: list[Tensor]) -> None:
    write_family(tmp_path, family, **POSITIONS)
    policy = load(tmp_path).eval()
    assert len(recurrent_layers(policy)) >= 1
    with torch.no_grad():
        torch.testing.assert_close(policy(pack(sequences)).logprobs, alone(policy, sequences), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", sorted(RECURRENT_LAYERS.keys() - UNMASKED))
def test_other_attention_masks_packed_sequences(
    family: str, attention: AttentionName, tmp_path: Path, sequences: list[Tensor]
) -> None:
    write_family(tmp_path, family, **POSITIONS)
    policy = load(tmp_path, attn_implementation=attention).eval()
    with torch.no_grad():
        torch.testing.assert_close(policy(pack(sequences)).logprobs, alone(policy, sequences), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", RECURRENT_LAYERS)
def test_gradients_are_the_sum_of_those_of_each_alone(family: str, tmp_path: Path, sequences: list[Tensor]) -> None:
    """With gradient checkpoints, which compute layers again in the backward pass."""
    write_family(tmp_path, family, **POSITIONS)
    policy = load(tmp_path, disable_gradient_checkpointing=False).train()
    assert policy.model.is_gradient_checkpointing
    out = policy(pack(sequences)).logprobs.square().sum()
    policy(pack(sequences[:2]))  # another forward pass before the backward one
    out.backward()
    packed = {
        name: parameter.grad.clone() for name, parameter in policy.named_parameters() if parameter.grad is not None
    }
    policy.zero_grad()
    for tokens in sequences:
        if len(tokens) > 1:
            policy(pack([tokens])).logprobs.square().sum().backward()
    expected = {name: parameter.grad for name, parameter in policy.named_parameters() if parameter.grad is not None}
    errors = {name: float((packed[name] - grad).norm() / grad.norm()) for name, grad in expected.items()}
    assert len(errors) == len(list(policy.parameters()))
    assert max(errors.values()) < 1e-3, errors


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "bamba"])
def test_adapters_of_recurrent_layers_are_trained(family: str, tmp_path: Path, sequences: list[Tensor]) -> None:
    write_family(tmp_path, family, **POSITIONS)
    policy = load(tmp_path, lora_target="all-linear", lora_rank=4).train()
    policy(pack(sequences)).logprobs.sum().backward()
    adapters = [
        parameter
        for layer in recurrent_layers(policy)
        for name, parameter in layer.named_parameters()
        if "lora" in name
    ]
    assert len(adapters) >= 4
    assert all(float(parameter.grad.abs().max()) > 0 for parameter in adapters if parameter.grad is not None)
    with torch.no_grad():
        torch.testing.assert_close(policy(pack(sequences)).logprobs, alone(policy, sequences), rtol=1e-4, atol=1e-4)


def test_no_kernel_reads_weights_past_their_adapters(
    tmp_path: Path, sequences: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mamba's fused one takes out_proj's weight in training."""
    from transformers.models.bamba import modeling_bamba

    write_family(tmp_path, "bamba", **POSITIONS)
    policy = load(tmp_path).train()
    monkeypatch.setattr(modeling_bamba, "mamba2_split_conv1d_scan_combined", lambda *_, **__: pytest.fail("called"))
    policy(pack(sequences)).logprobs.sum().backward()


@pytest.mark.parametrize("family", RECURRENT_LAYERS)
def test_exported_weights_are_those_of_transformers_checkpoints(family: str, tmp_path: Path) -> None:
    write_family(tmp_path, family)
    policy = load(tmp_path)
    weights = {weight.name.removeprefix("model."): weight.tensor() for weight in merged_weights(policy)}
    exported = dict(checkpoint_tensors(policy.model.config, weights.items()))
    policy.model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert exported.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in exported.items())


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_values_of_packed_sequences_are_those_of_each_alone(
    family: str, tmp_path: Path, sequences: list[Tensor]
) -> None:
    write_family(tmp_path, family, **POSITIONS)
    critic = load_critic(tmp_path, ModelArgs(), seed=0).eval()
    randomize(critic)
    with torch.no_grad():
        expected = torch.cat([critic(pack([tokens])) for tokens in sequences if len(tokens) > 1])
        torch.testing.assert_close(critic(pack(sequences)), expected, rtol=1e-4, atol=1e-4)


def test_scores_of_packed_conversations_are_those_of_each_alone(tmp_path: Path, sequences: list[Tensor]) -> None:
    write_family(tmp_path, "qwen3_5_text", **POSITIONS)
    reward_model = load_reward_model(tmp_path, ModelArgs(), seed=0).eval()
    randomize(reward_model)
    with torch.no_grad():
        expected = torch.cat([reward_model(pack([tokens])) for tokens in sequences if len(tokens) > 1])
        torch.testing.assert_close(reward_model(pack(sequences)), expected, rtol=1e-4, atol=1e-4)


def test_a_shared_prefix_is_refused(tmp_path: Path) -> None:
    write_family(tmp_path, "qwen3_5_text")
    with pytest.raises(ValueError, match="shared_prefix is not tested with 'qwen3_5_text'"):
        load(tmp_path, shared_prefix=True)
