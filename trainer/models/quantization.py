"""4-bit weights under adapters (QLoRA, arXiv:2305.14314), by bitsandbytes.

Invariants: a layer computes every pass with the weights that it gives as `weight`, which are those that engines get and
exports have; checkpoints have the 4-bit values themselves.
"""

import json
import logging
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.services.generation.adapter_settings import QUANTIZATION_CONFIG
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.adapter_files import read_quantization_settings

BLOCK_SIZE = 64
"""Weights with one scale; bitsandbytes' default, and QLoRA's."""


class QuantizedLinear(nn.Module):
    """Linear layer of frozen 4-bit weights."""

    packed: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear, quant_type: str, device: torch.device, *, is_nested: bool) -> None:
        super().__init__()
        weight = linear.weight.detach().to(device)
        packed, state = _functional().quantize_4bit(
            weight, blocksize=BLOCK_SIZE, quant_type=quant_type, compress_statistics=is_nested
        )
        self.bias = linear.bias
        self._shape, self._dtype, self._quant_type = weight.shape, weight.dtype, quant_type
        self.register_buffer("packed", packed)
        # As bytes, because engines convert buffers of floating point to 16 bits
        self.register_buffer("scales", state.absmax.view(torch.uint8))
        self._is_nested = is_nested
        if is_nested:
            of_scales = torch.cat([state.state2.absmax, state.offset.reshape(1)])
            self.register_buffer("scales_of_scales", of_scales.view(torch.uint8))

    @property
    def weight(self) -> Tensor:
        """Return new weights in the model's dtype."""
        functional = _functional()
        return functional.dequantize_4bit(self.packed, self._quant_state(functional))

    def _quant_state(self, functional: Any) -> Any:
        settings = {"blocksize": BLOCK_SIZE, "quant_type": self._quant_type, "dtype": self._dtype}
        absmax = self.scales
        if not self._is_nested:
            return functional.QuantState(absmax=absmax.view(torch.float32), shape=self._shape, **settings)
        of_scales = self.get_buffer("scales_of_scales").view(torch.float32)
        code = _code_of_scales(absmax.device)
        nested = functional.QuantState(absmax=of_scales[:-1], code=code, blocksize=256, dtype=torch.float32)
        return functional.QuantState(absmax=absmax, shape=self._shape, offset=of_scales[-1], state2=nested, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self)


class _Product(torch.autograd.Function):
    """x W^T + b, which computes W again for the gradient instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].matmul(ctx.layer.weight.to(grads[0].dtype)), None  # 16 bits under autocast


def quantize(model: nn.Module, paths: Iterable[str], args: ModelArgs, device: torch.device) -> None:
    """Replace linear layers by ones that are quantized on a device, each freed before the next."""
    for path in paths:
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        linear = owner.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        layer = QuantizedLinear(linear, args.bnb_4bit_quant_type, device, is_nested=args.use_bnb_nested_quant)
        setattr(owner, name, layer)


def quantized_layers(module: nn.Module) -> Iterator[QuantizedLinear]:
    return (layer for layer in module.modules() if isinstance(layer, QuantizedLinear))


def write_quantization(folder: Path, args: ModelArgs) -> None:
    settings = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": args.bnb_4bit_quant_type,
        "bnb_4bit_use_double_quant": args.use_bnb_nested_quant,
        "bnb_4bit_compute_dtype": args.dtype,
    }
    (folder / QUANTIZATION_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def read_quantization(folder: Path) -> ModelArgs | None:
    """Return the arguments that quantize an adapter's base; None if it is not quantized."""
    settings = read_quantization_settings(folder)
    if settings is None:
        return None
    return ModelArgs(
        dtype=settings["bnb_4bit_compute_dtype"],
        lora_target="all-linear",
        load_in_4bit=True,
        bnb_4bit_quant_type=settings["bnb_4bit_quant_type"],
        use_bnb_nested_quant=settings["bnb_4bit_use_double_quant"],
    )


def silence_bitsandbytes() -> None:
    """Silence the warning of a missing kernel for CPUs with AVX512-BF16, when bitsandbytes is imported, as PEFT does."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


@cache
@torch.inference_mode(False)
def _code_of_scales(device: torch.device) -> Tensor:
    """Return the values that nested scales stand for."""
    return _functional().create_dynamic_map().to(device)


@cache  # as to set a level clears the caches of all loggers
def _functional() -> Any:
    silence_bitsandbytes()
    from bitsandbytes import functional  # of an extra, and slow to import  # noqa: PLC0415

    return functional
