"""Messages as msgpack bytes; nothing that came over the network is unpickled.

Arrays travel as raw little-endian bytes. A segment carries its tokens in two bytes each where all fit, and the logprobs of
sampled tokens alone: version spans say which those are, and so what the loss mask is. Every blob opens with its kind and
schema version, and whatever does not follow the schema raises `CodecError`.
"""

import math
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import msgpack
import numpy as np
import numpy.typing as npt

from services.errors import CodecError
from services.pictures import check_pictures, check_unsampled, picture_rows, read_pictures
from services.schema import (
    SCHEMA_VERSION,
    Anchor,
    BoolArray,
    Completion,
    FinishReason,
    GenerateRequest,
    Manifest,
    Sampling,
    Segment,
    StopReason,
    TensorSpec,
    Trajectory,
    Turn,
    VersionSpan,
)

MAX_TOKENS = 1 << 24
"""Longest token sequence that is read; a larger claim is refused before anything is allocated."""
MAX_BLOB = 1 << 30
"""Bytes of the largest message that is read."""
NARROW = 2
"""Bytes of a token id below 65,536, in segments all of whose tokens are."""
UINT16, INT32, FLOAT32 = np.dtype("<u2"), np.dtype("<i4"), np.dtype("<f4")
NOTHING = np.zeros(0, dtype=np.float32)
MALFORMED = (ValueError, TypeError, AttributeError, OverflowError, LookupError)
"""What reading a body that does not follow its schema may raise."""


def _pack(kind: str, body: Any) -> bytes:
    return cast(bytes, msgpack.packb([kind, SCHEMA_VERSION, body], use_bin_type=True))


def _unpack(kind: str, blob: bytes) -> Any:
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


def _refuse(kind: str, error: Exception) -> NoReturn:
    raise CodecError(f"malformed {kind} message: {error}") from error


def _spans(rows: Any, length: int) -> tuple[VersionSpan, ...]:
    spans = tuple([VersionSpan(start, end, version) for start, end, version in rows])
    _check_spans(spans, length)
    return spans


def _check_spans(spans: Sequence[VersionSpan], length: int) -> None:
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


def _count(value: Any, what: str) -> int:
    """A whole number from 0 on that fits 64 bits."""
    number = int(value)
    if not 0 <= number < 1 << 63:
        raise ValueError(f"{what} {number}")
    return number


def _finite(value: Any, what: str) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} {number}")
    return number


def _tokens(data: Any, width: int = 4) -> npt.NDArray[np.int32]:
    """Token ids of `width` bytes each."""
    if width == NARROW:
        return np.frombuffer(data, dtype=UINT16).astype(np.int32)
    tokens = np.frombuffer(data, dtype=INT32).astype(np.int32, copy=False)
    _check_tokens(tokens)
    return tokens


def _check_tokens(tokens: npt.NDArray[np.int32]) -> None:
    if len(tokens) and np.minimum.reduce(tokens) < 0:
        raise ValueError("a negative token id")


def _logprobs(data: Any) -> npt.NDArray[np.float32]:
    logprobs = np.frombuffer(data, dtype=FLOAT32).astype(np.float32, copy=False)
    _check_logprobs(logprobs)
    return logprobs


def _check_logprobs(logprobs: npt.NDArray[np.float32]) -> None:
    if b"\0" in np.isfinite(logprobs).tobytes():  # a quarter of the time of `all`
        raise ValueError("a logprob that is not finite")


def _segment_body(segment: Segment) -> list[Any]:
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


def _segment(body: Any) -> Segment:
    length, data, sampled, versions, pictures = body
    if not 0 <= length <= MAX_TOKENS:
        raise ValueError(f"segment of {length} tokens")
    width = NARROW if len(data) == NARROW * length else 4
    if len(data) != width * length:
        raise ValueError(f"{len(data)} bytes of tokens, {length} tokens announced")
    spans = _spans(versions, length)
    mask, logprobs = _placed(spans, _logprobs(sampled), length)
    segment = Segment(_tokens(data, width), mask, logprobs, spans, read_pictures(pictures, length))
    check_unsampled(segment)
    return segment


def _placed(
    spans: Sequence[VersionSpan], sampled: npt.NDArray[np.float32], length: int
) -> tuple[BoolArray, npt.NDArray[np.float32]]:
    """Undo `_sampled`: loss mask and logprobs of all tokens."""
    mask, logprobs, taken = np.zeros(length, dtype=np.bool_), np.zeros(length, dtype=np.float32), 0
    for start, end, _ in spans:
        mask[start:end] = True
        logprobs[start:end] = sampled[taken : taken + end - start]
        taken += end - start
    if taken != len(sampled):
        raise ValueError(f"{taken} sampled tokens and {len(sampled)} logprobs")
    return mask, logprobs


def _check_segment(segment: Segment) -> None:
    tokens, mask, logprobs = segment.tokens, segment.loss_mask, segment.logprobs
    if tokens.dtype != np.int32 or mask.dtype != np.bool_ or logprobs.dtype != np.float32:
        raise TypeError(f"arrays of {tokens.dtype}, {mask.dtype} and {logprobs.dtype}")
    if not tokens.ndim == mask.ndim == logprobs.ndim == 1:
        raise ValueError(f"arrays of shapes {tokens.shape}, {mask.shape} and {logprobs.shape}")
    if len(tokens) > MAX_TOKENS:
        raise ValueError(f"segment of {len(tokens)} tokens")
    if not len(tokens) == len(mask) == len(logprobs):
        raise ValueError(f"{len(tokens)} tokens, {len(mask)} of the loss mask and {len(logprobs)} logprobs")
    _check_tokens(tokens)
    _check_spans(segment.versions, len(tokens))
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
    _check_logprobs(sampled)
    if np.count_nonzero(segment.logprobs) != np.count_nonzero(sampled):
        raise ValueError("a logprob of a token that the policy did not sample")


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Pack one trajectory that `check_trajectory` passes; `decode_trajectory` gives it back bit for bit."""
    t = trajectory
    body = [
        t.group_id,
        t.index,
        t.attempt,
        t.tag,
        t.seed,
        [_segment_body(segment) for segment in t.segments],
        [(turn.segment, turn.start, turn.end, turn.reward, turn.state_hash) for turn in t.turns],
        t.stop_reason.value,
        t.metrics,
        t.worker_id,
        t.duration_s,
        t.text,
        t.baseline,
    ]
    return _pack("trajectory", body)


def decode_trajectory(blob: bytes) -> Trajectory:
    """Unpack and check one trajectory.

    Raises:
        CodecError: the blob is truncated, of another schema, or breaks an invariant of `services.schema`.
    """
    body = _unpack("trajectory", blob)
    try:
        group_id, index, attempt, tag, seed, segments, turns, stop, metrics, worker_id, duration_s, text, baseline = (
            body
        )
        trajectory = Trajectory(
            group_id=str(group_id),
            index=_count(index, "index"),
            attempt=_count(attempt, "attempt"),
            tag=str(tag),
            seed=int(seed),
            segments=tuple([_segment(segment) for segment in segments]),
            turns=tuple([Turn(s, a, b, float(r), str(h)) for s, a, b, r, h in turns]),
            stop_reason=StopReason(stop),
            metrics={str(name): float(value) for name, value in metrics.items()},
            worker_id=str(worker_id),
            duration_s=_finite(duration_s, "duration"),
            text=tuple([str(part) for part in text]),
            baseline=bool(baseline),
        )
        _check_turns(trajectory)
    except MALFORMED as error:
        _refuse("trajectory", error)
    return trajectory


def encode_trajectories(trajectories: Sequence[Trajectory]) -> bytes:
    """Pack several, as a file keeps them."""
    return _pack("trajectories", [encode_trajectory(trajectory) for trajectory in trajectories])


def decode_trajectories(blob: bytes) -> list[Trajectory]:
    """Unpack `encode_trajectories`. Raises `CodecError` as `decode_trajectory` does."""
    body = _unpack("trajectories", blob)
    if not isinstance(body, list) or not all(isinstance(part, bytes) for part in body):
        raise CodecError("malformed trajectories message: not a list of blobs")
    return [decode_trajectory(part) for part in body]


def check_trajectory(trajectory: Trajectory) -> None:
    """See that `decode_trajectory` would read what `encode_trajectory` makes of it, without doing either.

    Raises:
        CodecError: it breaks an invariant of `services.schema`.
    """
    try:
        _count(trajectory.index, "index")
        _count(trajectory.attempt, "attempt")
        _finite(trajectory.duration_s, "duration")
        for value in trajectory.metrics.values():
            float(value)
        StopReason(trajectory.stop_reason)
        for segment in trajectory.segments:
            _check_segment(segment)
        _check_turns(trajectory)
    except MALFORMED as error:
        _refuse("trajectory", error)


def _check_turns(trajectory: Trajectory) -> None:
    lengths = [len(segment.tokens) for segment in trajectory.segments]
    for turn in trajectory.turns:
        segment, start, end = turn.segment, turn.start, turn.end
        if not type(segment) is type(start) is type(end) is int:
            raise TypeError(f"turn of tokens [{start}, {end}) in segment {segment}: not whole numbers")
        if not 0 <= segment < len(lengths):
            raise ValueError(f"turn in segment {segment} of {len(lengths)}")
        if not 0 <= start < end <= lengths[segment]:
            raise ValueError(f"turn of tokens [{start}, {end}) outside its segment")
        if not math.isfinite(turn.reward):
            raise ValueError(f"reward {turn.reward}")


def encode_requests(requests: list[GenerateRequest]) -> bytes:
    """Pack the turns that one call carries."""
    rows = [
        [
            r.request_id,
            np.asarray(r.prompt, dtype="<i4").tobytes(),
            r.sampling.temperature,
            r.sampling.top_p,
            r.sampling.top_k,
            r.sampling.max_new_tokens,
            list(r.sampling.stop_token_ids),
            r.min_version,
            picture_rows(r.pictures),
        ]
        for r in requests
    ]
    return _pack("requests", rows)


def decode_requests(blob: bytes) -> list[GenerateRequest]:
    """Unpack `encode_requests`. Raises `CodecError` as `decode_trajectory` does."""
    try:
        return [
            GenerateRequest(
                request_id=str(request_id),
                prompt=tuple(_tokens(prompt).tolist()),
                sampling=Sampling(
                    _finite(temperature, "temperature"),
                    _finite(top_p, "top_p"),
                    int(top_k),
                    _count(max_new, "max_new_tokens"),
                    tuple(_count(stop, "stop token") for stop in stops),
                ),
                min_version=_count(min_version, "min_version"),
                pictures=read_pictures(pictures, len(prompt) // 4),
            )
            for request_id, prompt, temperature, top_p, top_k, max_new, stops, min_version, pictures in _unpack(
                "requests", blob
            )
        ]
    except MALFORMED as error:
        _refuse("requests", error)


def encode_completions(completions: list[Completion]) -> bytes:
    """Pack the completions that one answer carries."""
    rows = [
        [
            c.request_id,
            np.asarray(c.token_ids, dtype="<i4").tobytes(),
            np.asarray(c.logprobs, dtype="<f4").tobytes(),
            [list(span) for span in c.versions],
            c.finish_reason.value,
            c.error,
        ]
        for c in completions
    ]
    return _pack("completions", rows)


def decode_completions(blob: bytes) -> list[Completion]:
    """Unpack `encode_completions`. Raises `CodecError` as `decode_trajectory` does."""
    try:
        out: list[Completion] = []
        for request_id, tokens, logprobs, versions, finish, error in _unpack("completions", blob):
            token_ids = tuple(_tokens(tokens).tolist())
            sampled = tuple(_logprobs(logprobs).tolist())
            if len(sampled) != len(token_ids):
                raise ValueError(f"{len(token_ids)} tokens and {len(sampled)} logprobs")
            out.append(
                Completion(
                    request_id=str(request_id),
                    token_ids=token_ids,
                    logprobs=sampled,
                    versions=_spans(versions, len(token_ids)),
                    finish_reason=FinishReason(finish),
                    error=str(error),
                )
            )
    except MALFORMED as error:
        _refuse("completions", error)
    return out


def encode_manifest(manifest: Manifest) -> bytes:
    """Pack one weight version's manifest."""
    m = manifest
    return _pack(
        "manifest",
        [
            m.run_id,
            m.version,
            m.step,
            m.epoch,
            m.transport,
            m.location,
            m.digest,
            m.num_bytes,
            [[t.name, t.dtype, list(t.shape)] for t in m.tensors],
            m.published_at,
            [m.anchor.location, m.anchor.digest, m.anchor.num_bytes] if m.anchor else None,
        ],
    )


def decode_manifest(blob: bytes) -> Manifest:
    """Unpack `encode_manifest`. Raises `CodecError` as `decode_trajectory` does."""
    body = _unpack("manifest", blob)
    try:
        run_id, version, step, epoch, transport, location, digest, num_bytes, tensors, published_at, anchor = body
        return Manifest(
            run_id=str(run_id),
            version=_count(version, "version"),
            step=_count(step, "step"),
            epoch=_count(epoch, "epoch"),
            transport=str(transport),
            location=str(location),
            digest=str(digest),
            num_bytes=_count(num_bytes, "num_bytes"),
            tensors=tuple(TensorSpec(str(n), str(d), tuple(_count(x, "dimension") for x in s)) for n, d, s in tensors),
            published_at=_finite(published_at, "published_at"),
            anchor=Anchor(str(anchor[0]), str(anchor[1]), _count(anchor[2], "num_bytes")) if anchor else None,
        )
    except MALFORMED as error:
        _refuse("manifest", error)
