from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat.services.generation.hf.model import PolicyModel
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
