"""A segment inside a message: its tokens in two bytes each where all fit, and the logprobs of sampled tokens alone.

Version spans say which tokens those are, and so what the loss mask is.

Invariant: what is read keeps the invariants of `services.schema`, and what passes the check is read back bit for bit.
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
    check_logprobs,
    check_spans,
    check_tokens,
    read_logprobs,
    read_spans,
    read_tokens,
)

NOTHING = np.zeros(0, dtype=np.float32)


def segment_body(segment: Segment) -> list[Any]:
    """As messages carry it."""
    tokens = segment.tokens
    fit = len(tokens) > 0 and np.maximum.reduce(tokens.view(np.uint32)) < 1 << 16
    return [
        len(tokens),
        tokens.astype(UINT16 if fit else INT32, order="C", copy=False).data,
        _sampled(segment).astype(FLOAT32, copy=False).data,
        segment.versions,
        picture_rows(segment.pictures),
    ]


def _sampled(segment: Segment) -> npt.NDArray[np.float32]:
    """[sampled] The logprobs of what the policy sampled."""
    return np.concatenate([segment.logprobs[start:end] for start, end, _ in segment.versions] or [NOTHING])


def read_segment(body: Any) -> Segment:
    """Undo `segment_body`. Raises one of `services.wire.MALFORMED`."""
    length, data, sampled, versions, pictures = body
    if not 0 <= length <= MAX_TOKENS:
        raise ValueError(f"segment of {length} tokens")
    width = NARROW if len(data) == NARROW * length else 4
    if len(data) != width * length:
        raise ValueError(f"{len(data)} bytes of tokens, {length} tokens announced")
    spans = read_spans(versions, length)
    mask, logprobs = _placed(spans, read_logprobs(sampled), length)
    segment = Segment(read_tokens(data, width), mask, logprobs, spans, read_pictures(pictures, length))
    check_unsampled(segment)
    return segment


def _placed(
    spans: Sequence[VersionSpan], sampled: npt.NDArray[np.float32], length: int
) -> tuple[BoolArray, npt.NDArray[np.float32]]:
    """Undo `_sampled`: loss mask and logprobs of all tokens. Bytes are put in place in half the time that arrays take."""
    mask, logprobs, values, taken = bytearray(length), bytearray(4 * length), sampled.tobytes(), 0
    for start, end, _ in spans:
        mask[start:end] = b"\1" * (end - start)
        logprobs[4 * start : 4 * end] = values[taken : taken + 4 * (end - start)]
        taken += 4 * (end - start)
    if taken != len(values):
        raise ValueError(f"{taken // 4} sampled tokens and {len(sampled)} logprobs")
    return np.frombuffer(mask, dtype=np.bool_), np.frombuffer(logprobs, dtype=np.float32)


def check_segment(segment: Segment) -> None:
    """Raises TypeError or ValueError unless `read_segment` would read what `segment_body` makes of it."""
    tokens, mask, logprobs = segment.tokens, segment.loss_mask, segment.logprobs
    if tokens.dtype != np.int32 or mask.dtype != np.bool_ or logprobs.dtype != np.float32:
        raise TypeError(f"arrays of {tokens.dtype}, {mask.dtype} and {logprobs.dtype}")
    if not tokens.ndim == mask.ndim == logprobs.ndim == 1:
        raise ValueError(f"arrays of shapes {tokens.shape}, {mask.shape} and {logprobs.shape}")
    if len(tokens) > MAX_TOKENS:
        raise ValueError(f"segment of {len(tokens)} tokens")
    if not len(tokens) == len(mask) == len(logprobs):
        raise ValueError(f"{len(tokens)} tokens, {len(mask)} of the loss mask and {len(logprobs)} logprobs")
    check_tokens(tokens)
    check_spans(segment.versions, len(tokens))
    _check_sampled(segment)
    check_pictures(segment.pictures, len(tokens))
    check_unsampled(segment)


def _check_sampled(segment: Segment) -> None:
    """Version spans, loss mask and logprobs speak of the same tokens."""
    covered = bytearray(len(segment.tokens))
    for start, end, _ in segment.versions:
        covered[start:end] = b"\1" * (end - start)
    if covered != segment.loss_mask.tobytes():
        raise ValueError("version spans and loss mask differ")
    sampled = _sampled(segment)
    check_logprobs(sampled)
    if np.count_nonzero(segment.logprobs) != np.count_nonzero(sampled):
        raise ValueError("a logprob of a token that the policy did not sample")
