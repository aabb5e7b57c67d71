"""Message envelope: kind, schema version and typed body, as msgpack.

Nothing is unpickled; arrays are little-endian.
"""

import math
from collections.abc import Sequence
from typing import Any, Generic, NoReturn, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from offbeat.services.errors import CodecError
from offbeat.services.messages.types import SCHEMA_VERSION, VersionSpan

MAX_TOKENS = 1 << 24
"""Per segment, checked before allocation."""
MAX_MESSAGE_BYTES = 1 << 30
NARROW = 2
"""Bytes per token if all ids are below 65,536."""
UINT16, UINT32, INT32, FLOAT32 = np.dtype("<u2"), np.dtype("<u4"), np.dtype("<i4"), np.dtype("<f4")
MALFORMED = (ValueError, TypeError, AttributeError, OverflowError, LookupError)
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError, MemoryError)

Body = TypeVar("Body")


class MessageFormat(Generic[Body]):
    def __init__(self, kind: str, body: type[Body]) -> None:
        self._kind = kind
        envelope: Any = tuple[str, int, body]  # no type expression: `body` is known at run time alone
        self._decoder: msgspec.msgpack.Decoder[tuple[str, int, Body]] = msgspec.msgpack.Decoder(envelope)

    def pack(self, body: Any) -> bytes:
        """Encode, or raise `CodecError`."""
        try:
            return ENCODER.encode((self._kind, SCHEMA_VERSION, body))
        except MALFORMED as error:
            self.refuse(error)

    def unpack(self, blob: bytes) -> Body:
        """Decode, or raise `CodecError`, also for another kind or schema version."""
        if len(blob) > MAX_MESSAGE_BYTES:
            raise CodecError(f"{self._kind} message of {len(blob)} bytes, more than {MAX_MESSAGE_BYTES}")
        try:
            kind, version, body = self._decoder.decode(blob)
        except UNREADABLE as error:
            self._check_envelope(*self._decode_envelope(blob))
            self.refuse(error)
        self._check_envelope(kind, version)
        return body

    def refuse(self, error: Exception) -> NoReturn:
        raise CodecError(f"malformed {self._kind} message: {error}") from error

    def _decode_envelope(self, blob: bytes) -> tuple[str, int]:
        try:
            return ENVELOPE.decode(blob)[:2]
        except UNREADABLE as error:
            raise CodecError(f"not a {self._kind} message: {error}") from error

    def _check_envelope(self, kind: str, version: int) -> None:
        if kind != self._kind:
            raise CodecError(f"expected a {self._kind} message, got {kind!r}")
        if version != SCHEMA_VERSION:
            raise CodecError(f"{self._kind} message has schema version {version!r}, this build reads {SCHEMA_VERSION}")


def _to_plain(value: Any) -> Any:
    """Convert NumPy scalars."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} can't be encoded")


ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_plain)
ENVELOPE = msgspec.msgpack.Decoder(tuple[str, int, msgspec.Raw])


def check_spans(spans: Sequence[VersionSpan], length: int) -> None:
    """Raise TypeError or ValueError unless spans are ordered, disjoint and within `length`."""
    position = 0
    for span in spans:
        start, end, version = span
        if not type(start) is type(end) is type(version) is int:
            raise TypeError(f"version span {tuple(span)} is not of whole numbers")
        if not position <= start < end <= length:
            raise ValueError(f"version span {tuple(span)} is not in order inside {length} tokens")
        if not 0 <= version < 1 << 31:  # `Segment.token_versions` is int32
            raise ValueError(f"version {version}")
        position = end


def check_count(value: Any, name: str) -> int:
    """Return a `Count`, or raise one of `MALFORMED`."""
    number = int(value)
    if not 0 <= number < 1 << 63:
        raise ValueError(f"{name} {number}")
    return number


def check_finite(value: Any, name: str) -> float:
    """Return a float, or raise one of `MALFORMED`."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} {number}")
    return number


def read_tokens(data: bytes, width: int = 4) -> npt.NDArray[np.int32]:
    """Decode, or raise ValueError."""
    if width == NARROW:
        return np.frombuffer(data, dtype=UINT16).astype(np.int32)
    tokens = np.frombuffer(data, dtype=INT32).astype(np.int32, copy=False)
    if len(tokens) and np.minimum.reduce(tokens) < 0:
        raise ValueError("a negative token id")
    return tokens


def read_logprobs(data: bytes) -> npt.NDArray[np.float32]:
    """Decode finite logprobs, or raise ValueError."""
    logprobs = np.frombuffer(data, dtype=FLOAT32).astype(np.float32, copy=False)
    if b"\0" in np.isfinite(logprobs).tobytes():  # four times as fast as `all`
        raise ValueError("a logprob that is not finite")
    return logprobs
