from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat.services.generation.hf.model import Adapter, PolicyModel, Version
from tests.families import write_family


def test_saved_buffers_come_with_the_weights(tmp_path: Path) -> None:
    """Routers' biases, without which other experts are chosen."""
    write_family(tmp_path, "glm4_moe")
    policy = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).eval()
    policy.state_dict()["model.layers.1.mlp.gate.e_score_correction_bias"].copy_(torch.linspace(0.6, -0.6, 4))
    save_file({name: tensor.clone() for name, tensor in policy.state_dict().items()}, tmp_path / "version.safetensors")
    tokens = torch.arange(3, 40)
    with torch.inference_mode():
        logprobs = policy(tokens[None]).logits[0].log_softmax(-1)
    model = PolicyModel(tmp_path, torch.float32)
    model.exchange(model.read(tmp_path / "version.safetensors"))
    expected = logprobs[:-1].gather(-1, tokens[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(model.score(tokens.tolist(), {}).logprobs), expected)


def test_routed_adapters_of_a_shared_expert_are_those_of_merged_weights(tmp_path: Path) -> None:
    """Qwen2-MoE gives its shared expert rows of tokens, without a dimension for the batch."""
    torch.manual_seed(0)
    write_family(tmp_path, "qwen2_moe")
    policy = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    weights = {name: each.detach().clone() for name, each in policy.named_parameters()}
    adapters = {
        path: Adapter(torch.randn(2, size), torch.randn(len(weights[f"{path}.weight"]), 2), 0.5)
        for layer in range(2)
        for path, size in (
            (f"model.layers.{layer}.mlp.shared_expert.up_proj", 64),
            (f"model.layers.{layer}.mlp.shared_expert_gate", 64),
            (f"model.layers.{layer}.self_attn.o_proj", 64),
        )
    }
    tokens = list(range(3, 40))
    model = PolicyModel(tmp_path, torch.float32)
    model.exchange(Version(weights))
    base = model.score(tokens, {})
    model.route(adapters)
    routed = model.score(tokens, adapters)
    merged = {f"{path}.weight": each.scaling * each.up @ each.down for path, each in adapters.items()}
    model.exchange(Version({name: each + merged.get(name, 0) for name, each in weights.items()}))
    expected = torch.tensor(model.score(tokens, {}).logprobs)
    torch.testing.assert_close(torch.tensor(routed.logprobs), expected, rtol=1e-4, atol=1e-4)
    assert (torch.tensor(base.logprobs) - expected).abs().max() > 0.05
