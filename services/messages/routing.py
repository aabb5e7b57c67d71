"""Experts of tokens in messages.

Invariants: a row holds the experts of one token in each layer, [layers, top_k]; rows are those of the first tokens.
"""

import numpy as np
import numpy.typing as npt

from offbeat.services.messages.types import Count, Message, RoutingArray

WIDTHS: dict[int, npt.DTypeLike] = {1: np.dtype("u1"), 2: np.dtype("<u2")}
"""Bytes of an expert's number: 1 up to 256 experts, as vLLM has it."""


class PackedRouting(Message, frozen=True):
    layers: Count
    top_k: Count
    width: Count
    experts: bytes


def pack_routing(routing: RoutingArray, max_rows: int) -> PackedRouting:
    """Encode, or raise TypeError or ValueError."""
    width = routing.dtype.itemsize
    if routing.dtype != WIDTHS.get(width):
        raise TypeError(f"experts of {routing.dtype}")
    if routing.ndim != 3:
        raise ValueError(f"experts of shape {routing.shape}, not [tokens, layers, top_k]")
    _, layers, top_k = routing.shape
    packed = PackedRouting(layers, top_k, width, routing.tobytes())
    _check_rows(packed, max_rows)
    return packed


def unpack_routing(packed: PackedRouting, max_rows: int) -> RoutingArray:
    """Decode, or raise one of `MALFORMED`."""
    if packed.width not in WIDTHS:
        raise ValueError(f"experts of {packed.width} bytes")
    _check_rows(packed, max_rows)
    return np.frombuffer(packed.experts, WIDTHS[packed.width]).reshape(-1, packed.layers, packed.top_k)


def join_routing(first: RoutingArray | None, rest: RoutingArray | None) -> RoutingArray | None:
    """Return the rows of a sequence's beginning, then those of its rest."""
    if first is None or rest is None:
        return rest if first is None else first
    return np.concatenate([first, rest])


def _check_rows(packed: PackedRouting, max_rows: int) -> None:
    row = packed.layers * packed.top_k * packed.width
    if not row or len(packed.experts) % row or len(packed.experts) > max_rows * row:
        raise ValueError(f"{len(packed.experts)} bytes of experts, {row} per token, for at most {max_rows} tokens")
