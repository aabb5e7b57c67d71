"""Scaled dot product attention in the precision that suits the device."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def dot_product_attention(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
    """Compute `scaled_dot_product_attention`, on a CPU in float32; the result has the query's dtype.

    PyTorch's backward pass on a CPU converts each small block of half-precision operands, which takes up to twice the time.
    """
    dtype = query.dtype
    if query.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        query, key, value = query.float(), key.float(), value.float()
    return scaled_dot_product_attention(query, key, value, **arguments).to(dtype)
