"""Attention over rows of a KV cache in place, registered with transformers.

On a CPU, transformers' paged attention masks all tokens of a pass against all cached ones; here each row meets its own
keys.
"""

# pyright: basic
import math
import mmap
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from offbeat.services.generation.hf.layout import Block, StepLayout

ROW_ATTENTION = "offbeat_rows"


class KvCache:
    """Keys and values by layer, [rows, row_length, heads * dimension]."""

    def __init__(self, num_rows: int, row_length: int) -> None:
        self.num_rows, self.row_length = num_rows, row_length
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store [1, K, T, D] at `slots`; return the layer's cache, [rows, row_length, K, D]."""
        if layer not in self._layers:
            self._layers[layer] = self._allocate(key), self._allocate(value)
        for cache, states in zip(self._layers[layer], (key, value), strict=True):
            cache.flatten(0, 1).index_copy_(0, slots, states[0].transpose(0, 1))
        return self._layers[layer]

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        for cache in (each for layer in self._layers.values() for each in layer):
            cache[target, :length] = cache[source, :length]

    @torch.inference_mode()
    def clear(self, row: int) -> None:
        for cache in (each for layer in self._layers.values() for each in layer):
            cache[row] = 0

    def _allocate(self, states: Tensor) -> Tensor:
        # A mapping is zero and commits memory as it is written: torch.zeros would write all of it, and so would huge pages,
        # for which numpy asks. Zeros, since a masked key that is no number would still make the output one.
        shape = (self.num_rows, self.row_length, states.shape[1], states.shape[3])
        memory = mmap.mmap(-1, states.element_size() * math.prod(shape), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        return torch.frombuffer(memory, dtype=states.dtype).view(shape)


def row_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: StepLayout,
    cache: KvCache,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Store keys and values [1, K, T, D] and attend within each row: query [1, H, T, D] -> [1, T, H, D].

    Raises:
        NotImplementedError: unsupported soft caps, sinks or mask.
    """
    unsupported = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if unsupported or attention_mask is not None or not getattr(module, "is_causal", True):
        needs = ", ".join(unsupported) or "a mask of its own"
        raise NotImplementedError(f"{type(module).__name__} needs {needs}: take actor_infer's strategy vllm")
    keys, values = cache.write(module.layer_idx, layout.slots, key, value)
    queries, shared = query[0].transpose(0, 1), query.shape[1] // key.shape[1]
    out = queries.new_empty(*queries.shape[:2], value.shape[3])
    for place, block in enumerate(layout.blocks):
        mask = layout.mask(place, sliding_window, shared, query.dtype)
        out[block.tokens] = _attend(block, queries[block.tokens], keys, values, mask, scaling)
    return out[None], None


def _attend(
    block: Block, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Attend from [n, H, D] to a block's rows -> [n, H, D]. Heads that share a key are batched as queries."""
    num_keys, (num_rows, width) = keys.shape[2], block.positions.shape
    shared = queries.shape[1] // num_keys
    if block.padding is None:
        padded = queries.unflatten(0, (num_rows, width))
    else:
        padded = queries.new_zeros(num_rows, width, *queries.shape[1:])
        padded[block.padding] = queries
    k, v = (_select(each[:, : block.length], block.rows).transpose(1, 2) for each in (keys, values))
    q = padded.unflatten(2, (num_keys, shared)).permute(0, 2, 1, 3, 4).flatten(2, 3)  # [R, K, width * shared, D]
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    out = out.unflatten(2, (width, shared)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    return out.flatten(0, 1) if block.padding is None else out[block.padding]


def _select(cache: Tensor, rows: slice | Tensor) -> Tensor:
    return cache[rows] if isinstance(rows, slice) else cache.index_select(0, rows)


AttentionInterface.register(ROW_ATTENTION, row_attention)
