"""Repairs of vLLM's layers on CPUs, of those that the model has."""

# pyright: basic
import sys
from typing import Any

GATED_DELTA = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
EXPERTS = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
"""Modules that models import with such layers alone."""


def repair() -> None:
    """Repair once in a process, after the model was loaded and before it is used."""
    if GATED_DELTA in sys.modules:
        module: Any = sys.modules[GATED_DELTA]
        if not isinstance(module._causal_conv1d_fwd_cpu, _Convolution):
            module._causal_conv1d_fwd_cpu = _Convolution(module._causal_conv1d_fwd_cpu)
    if EXPERTS in sys.modules:
        module = sys.modules[EXPERTS]
        method = module.UnquantizedFusedMoEMethod
        if method._setup_kernel is not _set_up_experts:
            _original.append(method._setup_kernel)
            method._setup_kernel = _set_up_experts


class _Convolution:
    """Convolution that takes the only token of a step, of which vLLM's engine would die."""

    def __init__(self, convolve: Any) -> None:
        self._convolve = convolve

    def __call__(self, *, x: Any, **arguments: Any) -> Any:
        """x: [channels, tokens], whose strides the kernel checks: those of one token may be of a wider matrix."""
        if x.shape[1] == 1:
            x = x.new_empty(x.shape[::-1]).copy_(x.T).T
        return self._convolve(x=x, **arguments)


_original: list[Any] = []


def _set_up_experts(method: Any, **arguments: Any) -> None:
    """Pack the weights of an update, too, which vLLM does for the first ones alone."""
    is_update = method.moe_kernel is not None
    _original[0](method, **arguments)
    if is_update:
        method.moe_kernel.fused_experts.process_weights_after_loading(arguments["layer"])
