"""The kernels of RMS normalization against vLLM's PyTorch operations, and where they are used."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from vllm import ir
from vllm.platforms import current_platform

from offbeat.services.generation.vllm import cpu_kernels

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM of another platform"),
]
EPSILON = 1e-6
NORM, FUSED = ir.ops.rms_norm, ir.ops.fused_add_rms_norm
current_platform.import_kernels()
cpu_kernels.register()


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("size", [8, 40, 64, 896])
@pytest.mark.parametrize("rows", [0, 1, 3, 17])
def test_the_kernels_equal_the_operations(rows: int, size: int):
    x, residual, weight = random(rows, size), random(rows, size) + 1, random(size)
    for given in (weight, None):
        expected = NORM.impls["native"].impl_fn(x, given, EPSILON)
        torch.testing.assert_close(cpu_kernels.rms_norm(x, given, EPSILON), expected, atol=2e-6, rtol=2e-6)
    expected, added = FUSED.impls["native"].impl_fn(x, residual, weight, EPSILON)
    normalized, sums = cpu_kernels.fused_add_rms_norm(x.clone(), residual.clone(), weight, EPSILON)
    torch.testing.assert_close(normalized, expected, atol=2e-6, rtol=2e-6)
    assert torch.equal(sums, added)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        pytest.param(random(3, 66), random(66), id="a size that the kernel refuses"),
        pytest.param(random(3, 128)[:, :64], random(64), id="heads within a larger tensor"),
        pytest.param(random(3, 64, dtype=torch.bfloat16), random(64, dtype=torch.bfloat16), id="bfloat16"),
        pytest.param(random(3, 64), random(64, dtype=torch.bfloat16), id="weights of another type"),
    ],
)
def test_other_arguments_go_to_the_operations(x: Tensor, weight: Tensor):
    with NORM.set_priority(cpu_kernels.PRIORITY["rms_norm"]):
        assert NORM.dispatch(x, weight, EPSILON).provider == "native"
    with FUSED.set_priority(cpu_kernels.PRIORITY["fused_add_rms_norm"]):
        assert FUSED.dispatch(x, x, weight, EPSILON).provider == "native"


@pytest.mark.parametrize("call", [NORM.dispatch, lambda x, *rest: FUSED.dispatch(x, x.clone(), *rest)])
def test_arguments_of_a_model_in_float32_go_to_the_kernels(call: Callable[..., ir.op.IrOpImpl]):
    with (
        NORM.set_priority(cpu_kernels.PRIORITY["rms_norm"]),
        FUSED.set_priority(cpu_kernels.PRIORITY["fused_add_rms_norm"]),
    ):
        assert call(random(5, 64), random(64), EPSILON).provider == cpu_kernels.PROVIDER
        assert call(random(5, 64), random(64), EPSILON, 32).provider == "native"
