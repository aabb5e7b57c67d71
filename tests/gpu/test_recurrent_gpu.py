"""Recurrent layers on a GPU compute packed sequences as on a CPU, by transformers' operations or installed kernels."""

from pathlib import Path

import pytest
import torch

from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.models.loading import load_policy
from tests.families import pack, write_family
from tests.trainer.models.test_recurrent_layers import LENGTHS, POSITIONS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next", "lfm2", "granitemoehybrid", "falcon_h1"])
def test_a_gpu_computes_what_a_cpu_computes(family: str, tmp_path: Path) -> None:
    write_family(tmp_path, family, **POSITIONS)
    generator = torch.Generator().manual_seed(0)
    x = pack([torch.randint(3, 60, (length,), generator=generator) for length in LENGTHS])
    policy = load_policy(tmp_path, ModelArgs(), seed=0).train()
    computed: list[tuple[torch.Tensor, torch.Tensor]] = []
    for device in ("cpu", "cuda"):
        policy.to(device).zero_grad()
        logprobs = policy(x.to(torch.device(device))).logprobs
        logprobs.square().sum().backward()
        grads = [weight.grad.flatten().cpu() for weight in policy.parameters() if weight.grad is not None]
        computed.append((logprobs.detach().cpu(), torch.cat(grads)))
    (logprobs, grads), (expected, expected_grads) = computed[1], computed[0]
    torch.testing.assert_close(logprobs, expected, rtol=1e-3, atol=1e-3)
    assert float((grads - expected_grads).norm()) < 1e-2 * float(expected_grads.norm())
    with torch.no_grad():
        half = policy.to(torch.bfloat16)(x.to(torch.device("cuda"))).logprobs.cpu()
    assert float((half - expected).abs().mean()) < 5e-2
