"""Packed segments: narrow tokens where ids fit, logprobs of sampled tokens only, loss mask from version spans.

The round trip is exact; invariants of `services.messages.types` are checked both ways.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import structs

from offbeat.services.messages.envelope import (
    FLOAT32,
    INT32,
    MAX_TOKENS,
    NARROW,
    UINT16,
    UINT32,
    check_spans,
    read_logprobs,
    read_tokens,
)
from offbeat.services.messages.images import check_images, check_unsampled
from offbeat.services.messages.routing import PackedRouting, pack_routing, unpack_routing
from offbeat.services.messages.types import Count, Message, PromptImage, Segment, VersionSpan

BOOL = np.dtype(np.bool_)


class PackedSegment(Message, frozen=True):
    length: Count
    tokens: bytes
    logprobs: bytes
    versions: tuple[VersionSpan, ...]
    images: tuple[PromptImage, ...]
    routing: PackedRouting | None = None


def pack_segment(segment: Segment) -> PackedSegment | tuple[object, ...]:
    """Encode, or raise TypeError or ValueError."""
    tokens, versions, length = segment.tokens, segment.versions, len(segment.tokens)
    _check_arrays(segment)
    check_spans(versions, length)
    # Slicing bytes takes half as long as slicing arrays.
    logprobs = segment.logprobs.tobytes()
    sampled = b"".join([logprobs[4 * start : 4 * end] for start, end, _ in versions])
    read_logprobs(sampled)
    mask, expanded = _place_sampled(versions, sampled, length)
    if mask != segment.loss_mask.tobytes():
        raise ValueError("version spans and loss mask differ")
    if expanded != logprobs:
        raise ValueError("a logprob of a token that the policy did not sample")
    check_images(segment.images, length)
    check_unsampled(segment)
    largest = np.maximum.reduce(tokens.view(UINT32), initial=0)  # a negative id is larger than all others
    if largest >= 1 << 31:
        raise ValueError("a negative token id")
    width = UINT16 if largest < 1 << 16 else INT32
    data = tokens.astype(width, order="C", copy=False).tobytes()
    packed = PackedSegment(length, data, sampled, versions, segment.images)
    # Without experts their field is left out, so that older builds can read it
    if segment.routing is None:
        return structs.astuple(packed)[:-1]
    return structs.replace(packed, routing=pack_routing(segment.routing, length))


def _check_arrays(segment: Segment) -> None:
    tokens, mask, logprobs = segment.tokens, segment.loss_mask, segment.logprobs
    if tokens.dtype != INT32 or mask.dtype != BOOL or logprobs.dtype != FLOAT32:
        raise TypeError(f"arrays of {tokens.dtype}, {mask.dtype} and {logprobs.dtype}")
    if not tokens.ndim == mask.ndim == logprobs.ndim == 1:
        raise ValueError(f"arrays of shapes {tokens.shape}, {mask.shape} and {logprobs.shape}")
    if len(tokens) > MAX_TOKENS:
        raise ValueError(f"segment of {len(tokens)} tokens")
    if not len(tokens) == len(mask) == len(logprobs):
        raise ValueError(f"{len(tokens)} tokens, {len(mask)} of the loss mask and {len(logprobs)} logprobs")


def unpack_segment(row: PackedSegment) -> Segment:
    """Decode, or raise one of `MALFORMED`."""
    length, data, versions = row.length, row.tokens, row.versions
    if length > MAX_TOKENS:
        raise ValueError(f"segment of {length} tokens")
    width = NARROW if len(data) == NARROW * length else 4
    if len(data) != width * length:
        raise ValueError(f"{len(data)} bytes of tokens, {length} tokens announced")
    check_spans(versions, length)
    read_logprobs(row.logprobs)
    mask, logprobs = _place_sampled(versions, row.logprobs, length)
    segment = Segment(
        read_tokens(data, width),
        np.frombuffer(mask, dtype=BOOL),
        np.frombuffer(logprobs, dtype=FLOAT32),
        versions,
        row.images,
        None if row.routing is None else unpack_routing(row.routing, length),
    )
    check_images(row.images, length)
    check_unsampled(segment)
    return segment


def _place_sampled(spans: Sequence[VersionSpan], sampled: bytes, length: int) -> tuple[bytearray, bytearray]:
    mask, logprobs, position = bytearray(length), bytearray(4 * length), 0
    for start, end, _ in spans:
        mask[start:end] = b"\1" * (end - start)
        logprobs[4 * start : 4 * end] = sampled[position : (position := position + 4 * (end - start))]
    if position != len(sampled):
        raise ValueError(f"{position // 4} sampled tokens and {len(sampled) // 4} logprobs")
    return mask, logprobs
