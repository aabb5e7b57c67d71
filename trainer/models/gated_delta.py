"""Layers of the gated delta rule (Qwen3.5, Qwen3-Next) by a part of their heads, for sequence parallelism.

Each rank projects its tokens, computes the convolution and the rule for its part of the heads over all tokens, and
projects the outputs of its tokens, as in attention (Ulysses, arXiv:2309.14509).
"""

# pyright: basic
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.trainer.models.packing import Packing, SequenceShard, pad, unpad
from offbeat.trainer.models.ulysses import join_heads, split_heads

PROJECTIONS: tuple[Mapping[str, int], ...] = (
    {"in_proj_qkv": 3, "in_proj_z": 1, "in_proj_b": 1, "in_proj_a": 1},
    {"in_proj_qkvz": 1, "in_proj_ba": 1},
)
"""Projections of a family's layer, and how many parts with all heads each has."""


def find_projections(layer: nn.Module) -> Mapping[str, int] | None:
    """Return the layer's projections; None for a layer of another kind."""
    return next((names for names in PROJECTIONS if all(hasattr(layer, name) for name in names)), None)


def compute_by_heads(layer: Any, compute: Callable[..., Tensor], hidden: Tensor, packing: Packing) -> Tensor:
    """Compute a layer: [1, n, H], this rank's tokens -> [1, n, H].

    compute: the layer's forward pass, of whatever has its attributes.
    """
    shard, names = packing.shard, find_projections(layer)
    assert shard is not None
    assert names is not None
    parts = [part for name in names for part in _parts(layer, name, getattr(layer, name)(hidden)[0])]
    widths = [part.shape[-1] for part in parts]
    rows = split_heads(torch.cat(parts, -1).transpose(0, 1)[None], shard)[0].transpose(0, 1)
    view = _view_of(layer, shard, names, widths)
    out = unpad([compute(view, each) for each in pad(rows.flatten(1), packing)], packing)
    heads = join_heads(out.unflatten(-1, (view.num_k_heads, -1))[None], shard)
    return layer.out_proj(heads.flatten(2))


def _parts(layer: Any, name: str, projected: Tensor) -> Sequence[Tensor]:
    """Divide a projection by key heads, of which each has its value heads: [n, heads, width] each."""
    sizes = [layer.key_dim, layer.key_dim, layer.value_dim] if name == "in_proj_qkv" else projected.shape[-1:]
    return [part.unflatten(-1, (layer.num_k_heads, -1)) for part in projected.split(list(sizes), -1)]


def _view_of(layer: Any, shard: SequenceShard, names: Mapping[str, int], widths: Sequence[int]) -> SimpleNamespace:
    """Return the layer with this rank's heads alone, whose projections take their parts of the exchanged rows."""

    def own(weight: Tensor) -> Tensor:
        return weight.chunk(shard.size)[shard.rank]

    heads = layer.num_k_heads // shard.size
    kernels = layer.conv1d.weight.split([layer.key_dim, layer.key_dim, layer.value_dim])
    view = SimpleNamespace(
        num_k_heads=heads,
        num_v_heads=layer.num_v_heads // shard.size,
        head_k_dim=layer.head_k_dim,
        head_v_dim=layer.head_v_dim,
        key_dim=layer.key_dim // shard.size,
        value_dim=layer.value_dim // shard.size,
        conv_kernel_size=layer.conv_kernel_size,
        activation=layer.activation,
        layer_idx=layer.layer_idx,
        conv1d=SimpleNamespace(weight=torch.cat([own(kernel) for kernel in kernels]), bias=None),
        A_log=own(layer.A_log),
        dt_bias=own(layer.dt_bias),
        norm=layer.norm,
        out_proj=nn.Identity(),
    )
    if hasattr(layer, "fix_query_key_value_ordering"):
        view.fix_query_key_value_ordering = partial(type(layer).fix_query_key_value_ordering, view)
    start = 0
    for name, count in names.items():
        setattr(view, name, partial(_take, heads=heads, widths=widths, parts=range(start, start := start + count)))
    return view


def _take(rows: Tensor, *, heads: int, widths: Sequence[int], parts: Sequence[int]) -> Tensor:
    """Return parts of rows, each with its heads side by side: [B, L, heads * widths] -> [B, L, D]."""
    columns = rows.unflatten(-1, (heads, -1)).split(list(widths), -1)
    return torch.cat([columns[part].flatten(-2) for part in parts], -1)
