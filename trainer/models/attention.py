"""Causal attention over packed tokens, registered with transformers.

Invariant: a token attends only to its own sequence, never to padding. On CPUs sequences of similar lengths are padded.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from offbeat.trainer.models.dot_product import dot_product_attention
from offbeat.trainer.models.packing import Packing, pad, unpad
from offbeat.trainer.models.tree_attention import tree_attention
from offbeat.trainer.models.ulysses import join_heads, split_heads

PACKED_ATTENTION = "offbeat_packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence: query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D].

    With `packing.shard`, these have the n tokens of this rank, which attends by its part of the heads over all N.

    Raises:
        NotImplementedError: unsupported soft caps, sinks, mask or window.
    """
    unsupported = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if unsupported or attention_mask is not None or not getattr(module, "is_causal", True):
        raise NotImplementedError(
            f"{type(module).__name__} needs {', '.join(unsupported) or 'a custom mask'}: "
            "set actor_train.model_args.attn_implementation to eager"
        )
    if packing.shard is None:
        return _attend(module, query, key, value, packing, scaling, dropout, sliding_window), None
    query, key, value = (split_heads(states, packing.shard) for states in (query, key, value))
    out = _attend(module, query, key, value, packing, scaling, dropout, sliding_window)
    return join_heads(out, packing.shard), None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
) -> Tensor:
    if packing.tree is not None:
        if sliding_window is not None and sliding_window < packing.tree.longest:
            raise NotImplementedError(
                f"{type(module).__name__} has a sliding window: set actor_train.model_args.shared_prefix to false"
            )
        return tree_attention(query, key, value, packing.tree, scaling, dropout)
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and not dropout:
        return _varlen(query, key, value, packing, scaling, sliding_window)
    return _padded(query, key, value, packing, scaling, dropout, sliding_window)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # loads CUDA kernels  # noqa: PLC0415

    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    borders, longest = packing.cu_seqlens, packing.max_len
    window_size = (-1 if window is None else window - 1, 0)
    gqa = query.shape[1] != key.shape[1]
    out = varlen_attn(
        q, k, v, borders, borders, longest, longest, scale=scale, window_size=window_size, enable_gqa=gqa
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out[None]


def _padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scale: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    buckets = zip(*(pad(states[0].transpose(0, 1), packing) for states in (query, key, value)), strict=True)
    rows: list[Tensor] = []
    for bucket in buckets:
        q, k, v = (states.transpose(1, 2) for states in bucket)
        length = q.shape[2]
        mask = None if window is None or window >= length else _sliding_window_mask(length, window, query.device)
        out = dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        rows.append(out.transpose(1, 2))
    return unpad(rows, packing)[None]


def _sliding_window_mask(length: int, window: int, device: torch.device) -> Tensor:
    offset = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None]
    return (offset >= 0) & (offset < window)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
