"""Packed sequences are computed as alone, and models for which that does not hold are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from offbeat.services.generation.config import AttentionName
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.models import loading
from offbeat.trainer.models.limits import packing_problem
from offbeat.trainer.models.loading import load_critic, load_policy, load_reward_model
from offbeat.trainer.models.policy import PackedPolicy
from tests.families import pack, write_family

PACKED = (
    *("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "llama", "mistral", "gemma", "gemma2", "gemma3_text", "gemma4_text"),
    *("phi3", "glm", "glm4", "glm4_moe", "deepseek_v2", "deepseek_v3", "granite", "olmo2", "gpt2", "smollm3", "opt"),
)
RECURRENT = ("mamba", "mamba2", "jamba", "recurrent_gemma", "rwkv", "zamba2")
OWN_ATTENTION = ("bloom", "mpt", "falcon", "gptj", "gpt_neo", "codegen", "stablelm")
LENGTHS = (40, 7, 23)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 32,
}


def leak(policy: PackedPolicy) -> float:
    """Return how far logprobs of packed sequences are from those of each alone."""
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
        generator = torch.Generator().manual_seed(0)
        sequences = [torch.randint(3, 60, (length,), generator=generator) for length in LENGTHS]
        alone = torch.cat([policy(pack([each])).logprobs for each in sequences])
        return float((policy(pack(sequences)).logprobs - alone).abs().max())


@pytest.mark.parametrize("family", PACKED)
def test_packed_sequences_are_computed_as_alone(family: str, tmp_path: Path) -> None:
    write_family(tmp_path, family)
    assert leak(load_policy(tmp_path, ModelArgs(), seed=0).eval()) < 1e-4


@pytest.mark.parametrize("family", ["gemma2", "vaultgemma"])
def test_soft_caps_are_computed(family: str, tmp_path: Path) -> None:
    """Logprobs are those of transformers, whatever attention is chosen for them."""
    write_family(tmp_path, family)
    policy = load_policy(tmp_path, ModelArgs(), seed=0).eval()
    assert leak(policy) < 1e-4
    tokens = torch.randint(3, 60, (20,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = policy.model(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        torch.testing.assert_close(policy(pack([tokens])).logprobs, expected, rtol=1e-4, atol=1e-4)
    policy.train()(pack([tokens])).logprobs.sum().backward()


@pytest.mark.parametrize(("family", "attention"), [("gpt_oss", "auto"), ("gpt_oss", "eager"), ("opt", "eager")])
def test_masks_that_ignore_positions_are_refused(
    family: str, attention: AttentionName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers' own masks of these families let packed sequences see each other."""
    write_family(tmp_path, family)
    assert family in str(packing_problem(AutoModelForCausalLM, tmp_path, attention))
    monkeypatch.setattr(loading, "packing_problem", lambda *_: None)
    args = ModelArgs(attn_implementation=attention)
    assert leak(load_policy(tmp_path, args, seed=0).eval()) > 1e-3


def test_attention_that_ignores_soft_caps_is_refused(tmp_path: Path) -> None:
    write_family(tmp_path, "gemma2")
    assert "leave attn_implementation out" in str(packing_problem(AutoModelForCausalLM, tmp_path, "sdpa"))
    assert packing_problem(AutoModelForCausalLM, tmp_path, "eager") is None


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "mxfp4"},
    ],
)
@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModel, AutoModelForSequenceClassification])
def test_quantized_weights_are_refused(settings: dict[str, Any], auto: Any, tmp_path: Path) -> None:
    """Policies, critics, reward models; the learner would train the codes without their scales."""
    write_family(tmp_path, "qwen3")
    assert packing_problem(auto, tmp_path) is None
    write_family(tmp_path, "qwen3", quantization_config=settings)
    assert f"quantized ({settings['quant_method']})" in str(packing_problem(auto, tmp_path))
    with pytest.raises(ValueError, match="take a bfloat16 copy"):
        load_policy(tmp_path, ModelArgs(), seed=0)


@pytest.mark.parametrize(
    ("family", "attention"),
    [("stablelm", "sdpa"), ("stablelm", "eager"), ("gptj", "eager"), ("gpt_neo", "eager"), ("codegen", "eager")],
)
def test_own_attention_that_masks_packed_sequences_is_taken(
    family: str, attention: AttentionName, tmp_path: Path
) -> None:
    write_family(tmp_path, family)
    with pytest.raises(ValueError, match="set attn_implementation to eager"):
        load_policy(tmp_path, ModelArgs(), seed=0)
    assert leak(load_policy(tmp_path, ModelArgs(attn_implementation=attention), seed=0).eval()) < 1e-4


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_own_attention_that_does_not_is_refused_in_any_case(attention: AttentionName, tmp_path: Path) -> None:
    write_family(tmp_path, "bloom")
    with pytest.raises(ValueError, match="bloom"):
        load_policy(tmp_path, ModelArgs(attn_implementation=attention), seed=0)


def test_a_hybrid_family_without_a_recurrent_layer_is_packed(tmp_path: Path) -> None:
    """Granite 4.0 without H."""
    write_family(tmp_path, "granitemoehybrid", layer_types=["full_attention"] * 2, position_embedding_type="rope")
    assert leak(load_policy(tmp_path, ModelArgs(), seed=0).eval()) < 1e-4


@pytest.mark.parametrize("family", ["mamba2", "bloom"])
def test_refused_models_would_leak(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_family(tmp_path, family)
    monkeypatch.setattr(loading, "packing_problem", lambda *_: None)
    assert leak(load_policy(tmp_path, ModelArgs(), seed=0).eval()) > 1e-3


@pytest.mark.parametrize("family", [*RECURRENT, *OWN_ATTENTION])
def test_a_model_that_can_not_be_packed_is_refused_with_others_to_take(family: str, tmp_path: Path) -> None:
    write_family(tmp_path, family)
    says = rf"{family}\b.*take a model with attention alone, such as Qwen2.5"
    with pytest.raises(ValueError, match=says):
        load_policy(tmp_path, ModelArgs(), seed=0)
    with pytest.raises(ValueError, match=says):
        load_critic(tmp_path, ModelArgs(), seed=0)
    with pytest.raises(ValueError, match=rf"{family}\b.*take"):
        load_reward_model(tmp_path, ModelArgs(), seed=0)


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModel, AutoModelForSequenceClassification])
@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "mamba7"}, "model type `mamba7` but Transformers does not recognize"),
        ({}, "Unrecognized model"),
        ({"model_type": "qwen2", "num_hidden_layers": "many"}, "can't read its config.json"),
        ({"model_type": "siglip_vision_model"}, "has no siglip_vision_model"),
    ],
)
def test_a_model_unknown_to_transformers_is_named(config: dict[str, Any], says: str, auto: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    problem = packing_problem(auto, tmp_path)
    if auto is AutoModel and "siglip" in says:
        return
    assert problem is not None
    assert says in problem
    assert "\n" not in problem


def test_a_family_without_a_classifier_is_not_said_to_lack_attention(tmp_path: Path) -> None:
    write_family(tmp_path, "glm4_moe")
    problem = packing_problem(AutoModelForSequenceClassification, tmp_path)
    assert problem is not None
    assert problem.endswith("has no glm4_moe: take a family that it has, such as Qwen2.5, Qwen3, Llama 3 or Mistral")


def test_chunks_and_long_positions_limit_the_context(tmp_path: Path) -> None:
    write_family(tmp_path / "chunks", "llama4_text", attention_chunk_size=64, num_local_experts=2)
    write_family(tmp_path / "phi", "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=32)
    for folder, longest in (("chunks", 64), ("phi", 32)):
        assert packing_problem(AutoModelForCausalLM, tmp_path / folder, context=longest) is None
        problem = packing_problem(AutoModelForCausalLM, tmp_path / folder, context=longest + 1)
        assert problem is not None
        assert f"{longest} tokens" in problem


def test_a_language_model_out_of_one_with_image_input_is_refused(tmp_path: Path) -> None:
    """Its weights have other names than the folder's, from which engines know the model."""
    write_family(tmp_path, "llama4_text", attention_chunk_size=64, num_local_experts=2)
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "llama4", "text_config": text, "vision_config": {}}
    whole["architectures"] = ["Llama4ForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(whole))
    problem = packing_problem(AutoModelForCausalLM, tmp_path)
    assert problem is not None
    assert problem.startswith("llama4 has image input")


def test_a_family_that_draws_its_experts_in_training_is_refused(tmp_path: Path) -> None:
    write_family(tmp_path, "phimoe", num_local_experts=4)
    assert "draws its experts at random" in (packing_problem(AutoModelForCausalLM, tmp_path) or "")
    with pytest.raises(ValueError, match="draws its experts at random"):
        load_policy(tmp_path, ModelArgs(), seed=0)
