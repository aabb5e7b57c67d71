"""The learner on a GPU: the varlen kernel says what padding says."""

import pytest
import torch

from offbeat.trainer.models.attention import packed_attention
from offbeat.trainer.models.packing import Packing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize(("kv_heads", "window"), [(4, None), (2, None), (4, 8)])
def test_the_varlen_kernel_agrees_with_padding(kv_heads: int, window: int | None) -> None:
    torch.manual_seed(0)
    packing = Packing.of(torch.tensor([0, 7, 8, 40, 90], device="cuda"))
    query = torch.randn(1, 4, 90, 64, device="cuda")
    key, value = (torch.randn(1, kv_heads, 90, 64, device="cuda") for _ in range(2))
    grads: list[list[torch.Tensor]] = []
    outputs: list[torch.Tensor] = []
    for kind in (torch.float32, torch.bfloat16):
        leaves = [states.to(kind).requires_grad_() for states in (query, key, value)]
        out, _ = packed_attention(
            torch.nn.Module(), *leaves, None, packing=packing, scaling=0.125, sliding_window=window
        )
        out.float().square().sum().backward()
        outputs.append(out.float())
        grads.append([leaf.grad.float() for leaf in leaves if leaf.grad is not None])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=3e-2)
    for plain, varlen in zip(*grads, strict=True):
        torch.testing.assert_close(plain, varlen, rtol=5e-2, atol=1e-1)
