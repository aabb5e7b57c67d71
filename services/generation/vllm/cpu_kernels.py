"""RMS normalization by the kernels that vLLM compiles for CPUs, and by default replaces by seven PyTorch operations."""

# pyright: basic
import torch
from torch import Tensor
from vllm import ir
from vllm.platforms import current_platform

PROVIDER = "offbeat_cpu"
PRIORITY = {"rms_norm": [PROVIDER, "native"], "fused_add_rms_norm": [PROVIDER, "native"]}
"""vLLM's `ir_op_priority`."""
SIZE_MULTIPLE = 8
"""Of the normalized dimension."""


def register() -> None:
    """Register the implementations with vLLM, once in a process."""
    if PROVIDER not in ir.ops.rms_norm.impls:
        is_cpu = current_platform.is_cpu()
        ir.ops.rms_norm.register_impl(PROVIDER, supported=is_cpu, supports_args=fits)(rms_norm)
        fused = ir.ops.fused_add_rms_norm.register_impl(
            PROVIDER, supported=is_cpu, supports_args=fits_fused, inplace=True
        )
        fused(fused_add_rms_norm)


def fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Return whether the kernel takes the arguments; in half precision it rounds once, and the learner's model twice."""
    del epsilon
    return (
        x.dtype is torch.float32
        and variance_size is None
        and x.shape[-1] % SIZE_MULTIPLE == 0
        and x.is_contiguous()
        and (weight is None or weight.dtype is torch.float32)
    )


def fits_fused(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    """Return whether the kernel takes the arguments."""
    is_like = x_residual.dtype is x.dtype and x_residual.is_contiguous()
    return is_like and fits(x, weight, epsilon, variance_size)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    del variance_size
    normalized = torch.empty_like(x)
    torch.ops._C.rms_norm.default(normalized, x, weight, epsilon)
    return normalized


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Add in place to `x_residual`, normalize in place to `x`."""
    del variance_size
    torch.ops._C.fused_add_rms_norm.default(x, x_residual, weight, epsilon)
    return x, x_residual
