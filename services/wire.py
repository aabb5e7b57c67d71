"""What every message is made of: an envelope of kind and schema version, numbers, tokens, spans, each read with its checks.

Nothing that came over the network is unpickled. Arrays travel as raw little-endian bytes.
"""

import math
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import msgpack
import numpy as np
import numpy.typing as npt

from services.errors import CodecError
from services.schema import SCHEMA_VERSION, VersionSpan

MAX_TOKENS = 1 << 24
"""Longest token sequence that is read; a larger claim is refused before anything is allocated."""
MAX_BLOB = 1 << 30
"""Bytes of the largest message that is read."""
NARROW = 2
"""Bytes of a token id below 65,536, in segments all of whose tokens are."""
UINT16, UINT32, INT32, FLOAT32 = np.dtype("<u2"), np.dtype("<u4"), np.dtype("<i4"), np.dtype("<f4")
MALFORMED = (ValueError, TypeError, AttributeError, OverflowError, LookupError)
"""What reading a body that does not follow its schema may raise."""


def pack(kind: str, body: Any) -> bytes:
    """A message."""
    return cast(bytes, msgpack.packb([kind, SCHEMA_VERSION, body], use_bin_type=True))


def unpack(kind: str, blob: bytes) -> Any:
    """The body of a message. Raises `CodecError` if it is not one of that kind and of this schema."""
    if len(blob) > MAX_BLOB:
        raise CodecError(f"{kind} message of {len(blob)} bytes: at most {MAX_BLOB} are read")
    try:
        found, version, body = msgpack.unpackb(blob, raw=False, use_list=True)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CodecError(f"not a {kind} message: {error}") from error
    if found != kind:
        raise CodecError(f"expected a {kind} message, got {found!r}")
    if version != SCHEMA_VERSION:
        raise CodecError(f"{kind} message has schema version {version!r}, this build reads {SCHEMA_VERSION}")
    return body


def refuse(kind: str, error: Exception) -> NoReturn:
    """Raise `CodecError` for what reading a body has raised."""
    raise CodecError(f"malformed {kind} message: {error}") from error


def read_spans(rows: Any, length: int) -> tuple[VersionSpan, ...]:
    """Version spans over `length` tokens. Raises one of `MALFORMED`."""
    # As `VersionSpan._make`, at half its price, without its look at the length, which the check takes again.
    spans = tuple([tuple.__new__(VersionSpan, row) for row in rows])
    check_spans(spans, length)
    return spans


def check_spans(spans: Sequence[VersionSpan], length: int) -> None:
    """Raises TypeError or ValueError unless they are in order, apart and inside."""
    position = 0
    for span in spans:
        start, end, version = span
        if not type(start) is type(end) is type(version) is int:
            raise TypeError(f"version span {tuple(span)} is not of whole numbers")
        if not position <= start < end <= length:
            raise ValueError(f"version span {tuple(span)} is not in order inside {length} tokens")
        if not 0 <= version < 1 << 63:
            raise ValueError(f"version {version}")
        position = end


def count(value: Any, what: str) -> int:
    """A whole number from 0 on that fits 64 bits."""
    number = int(value)
    if not 0 <= number < 1 << 63:
        raise ValueError(f"{what} {number}")
    return number


def finite(value: Any, what: str) -> float:
    """A number that is one. Raises one of `MALFORMED`."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} {number}")
    return number


def read_tokens(data: Any, width: int = 4) -> npt.NDArray[np.int32]:
    """Token ids of `width` bytes each."""
    if width == NARROW:
        return np.frombuffer(data, dtype=UINT16).astype(np.int32)
    tokens = np.frombuffer(data, dtype=INT32).astype(np.int32, copy=False)
    check_tokens(tokens)
    return tokens


def check_tokens(tokens: npt.NDArray[np.int32]) -> None:
    """Raises ValueError if one is negative."""
    if len(tokens) and np.minimum.reduce(tokens) < 0:
        raise ValueError("a negative token id")


def read_logprobs(data: Any) -> npt.NDArray[np.float32]:
    """Logprobs, all finite. Raises one of `MALFORMED`."""
    logprobs = np.frombuffer(data, dtype=FLOAT32).astype(np.float32, copy=False)
    check_logprobs(logprobs)
    return logprobs


def check_logprobs(logprobs: npt.NDArray[np.float32]) -> None:
    """Raises ValueError if one is not finite."""
    if b"\0" in np.isfinite(logprobs).tobytes():  # a quarter of the time of `all`
        raise ValueError("a logprob that is not finite")
