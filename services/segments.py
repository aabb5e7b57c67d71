"""A segment inside a message: its tokens in two bytes each where all fit, and the logprobs of sampled tokens alone.

Version spans say which tokens those are, and so what the loss mask is.

Invariant: what is read keeps the invariants of `services.schema`, and what is written is read back bit for bit.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from services.pictures import check_pictures, check_unsampled, picture_rows, read_pictures
from services.schema import BoolArray, Segment, VersionSpan
from services.wire import (
    FLOAT32,
    INT32,
    MAX_TOKENS,
    NARROW,
    UINT16,
    UINT32,
    check_spans,
    read_logprobs,
    read_spans,
    read_tokens,
)

BOOL = np.dtype(np.bool_)


def segment_body(segment: Segment) -> list[Any]:
    """As messages carry it: what `read_segment` gives back bit for bit. Raises TypeError or ValueError if it could not."""
    tokens, length = segment.tokens, len(segment.tokens)
    _check_arrays(segment)
    check_spans(segment.versions, length)
    sampled = _sampled(segment)
    _check_sampled(segment, sampled)
    check_pictures(segment.pictures, length)
    check_unsampled(segment)
    largest = np.maximum.reduce(tokens.view(UINT32), initial=0)  # a negative id is larger than all others
    if largest >= 1 << 31:
        raise ValueError("a negative token id")
    width = UINT16 if length > 0 and largest < 1 << 16 else INT32
    data = tokens.astype(width, order="C", copy=False).data
    return [length, data, sampled, segment.versions, picture_rows(segment.pictures)]


def _sampled(segment: Segment) -> bytes:
    """The logprobs of what the policy sampled, as they travel. Bytes are cut in half the time that arrays take."""
    values = segment.logprobs.astype(FLOAT32, copy=False).tobytes()
    return b"".join([values[4 * start : 4 * end] for start, end, _ in segment.versions])


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


def _check_sampled(segment: Segment, sampled: bytes) -> None:
    """Version spans, loss mask and logprobs speak of the same tokens."""
    covered = bytearray(len(segment.tokens))
    for start, end, _ in segment.versions:
        covered[start:end] = b"\1" * (end - start)
    if covered != segment.loss_mask.tobytes():
        raise ValueError("version spans and loss mask differ")
    logprobs = read_logprobs(sampled)
    # Counted as bits, which takes a third of the time: a zero with a sign would be lost, too.
    if np.count_nonzero(segment.logprobs.view(UINT32)) != np.count_nonzero(logprobs.view(UINT32)):
        raise ValueError("a logprob of a token that the policy did not sample")


def read_segment(body: Any) -> Segment:
    """Undo `segment_body`. Raises one of `services.wire.MALFORMED`."""
    length, data, sampled, versions, pictures = body
    if not 0 <= length <= MAX_TOKENS:
        raise ValueError(f"segment of {length} tokens")
    width = NARROW if len(data) == NARROW * length else 4
    if len(data) != width * length:
        raise ValueError(f"{len(data)} bytes of tokens, {length} tokens announced")
    spans = read_spans(versions, length)
    read_logprobs(sampled)
    mask, logprobs = _placed(spans, bytes(sampled), length)
    segment = Segment(read_tokens(data, width), mask, logprobs, spans, read_pictures(pictures, length))
    check_unsampled(segment)
    return segment


def _placed(spans: Sequence[VersionSpan], values: bytes, length: int) -> tuple[BoolArray, npt.NDArray[np.float32]]:
    """Undo `_sampled`: loss mask and logprobs of all tokens. Bytes are put in place in half the time that arrays take."""
    mask, logprobs, taken = bytearray(length), bytearray(4 * length), 0
    for start, end, _ in spans:
        mask[start:end] = b"\1" * (end - start)
        logprobs[4 * start : 4 * end] = values[taken : taken + 4 * (end - start)]
        taken += 4 * (end - start)
    if taken != len(values):
        raise ValueError(f"{taken // 4} sampled tokens and {len(values) // 4} logprobs")
    return np.frombuffer(mask, dtype=BOOL), np.frombuffer(logprobs, dtype=FLOAT32)
