"""Repair of vLLM's gated delta rule on CPUs, which a prompt of one token would end."""

# pyright: basic
import sys
from typing import Any

MODULE = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
"""Imported by models with such layers alone."""


def repair() -> None:
    """Let the convolution take the only token of a step; the model must have been loaded."""
    module: Any = sys.modules.get(MODULE)
    if module is None or isinstance(module._causal_conv1d_fwd_cpu, _Convolution):
        return
    module._causal_conv1d_fwd_cpu = _Convolution(module._causal_conv1d_fwd_cpu)


class _Convolution:
    def __init__(self, convolve: Any) -> None:
        self._convolve = convolve

    def __call__(self, *, x: Any, **arguments: Any) -> Any:
        """x: [channels, tokens], whose strides the kernel checks: those of one token may be of a wider matrix."""
        if x.shape[1] == 1:
            x = x.new_empty(x.shape[::-1]).copy_(x.T).T
        return self._convolve(x=x, **arguments)
