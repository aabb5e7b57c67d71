"""Messages as msgpack bytes; nothing that came over the network is unpickled.

Arrays travel as raw little-endian bytes, masks as packed bits. Every blob opens with its kind and schema version, and
whatever does not follow the schema raises `CodecError`.
"""

from typing import Any, NoReturn, cast

import msgpack
import numpy as np

from services.errors import CodecError
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


def _pack(kind: str, body: Any) -> bytes:
    return cast(bytes, msgpack.packb([kind, SCHEMA_VERSION, body], use_bin_type=True))


def _unpack(kind: str, blob: bytes) -> Any:
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


def _pack_mask(mask: BoolArray) -> bytes:
    return np.packbits(mask).tobytes()


def _unpack_mask(data: bytes, length: int) -> BoolArray:
    bits = np.frombuffer(data, dtype=np.uint8)
    if len(bits) != (length + 7) // 8:
        raise ValueError(f"mask of {len(bits)} bytes for {length} tokens")
    return np.unpackbits(bits, count=length).astype(np.bool_)


def _spans(rows: Any, length: int) -> tuple[VersionSpan, ...]:
    spans = tuple(VersionSpan(int(start), int(end), int(version)) for start, end, version in rows)
    position = 0
    for span in spans:
        if not position <= span.start < span.end <= length:
            raise ValueError(f"version span {tuple(span)} is not in order inside {length} tokens")
        position = span.end
    return spans


def _segment_body(segment: Segment) -> list[Any]:
    return [
        len(segment.tokens),
        segment.tokens.astype("<i4", copy=False).tobytes(),
        _pack_mask(segment.loss_mask),
        segment.logprobs.astype("<f4", copy=False).tobytes(),
        [list(span) for span in segment.versions],
    ]


def _segment(body: Any) -> Segment:
    length, tokens, mask, logprobs, versions = body
    if not 0 <= length <= MAX_TOKENS:
        raise ValueError(f"segment of {length} tokens")
    segment = Segment(
        tokens=np.frombuffer(tokens, dtype="<i4").astype(np.int32, copy=False),
        loss_mask=_unpack_mask(mask, length),
        logprobs=np.frombuffer(logprobs, dtype="<f4").astype(np.float32, copy=False),
        versions=_spans(versions, length),
    )
    if len(segment.tokens) != length or len(segment.logprobs) != length:
        raise ValueError(f"{len(segment.tokens)} tokens and {len(segment.logprobs)} logprobs, {length} announced")
    if length and int(segment.tokens.min()) < 0:
        raise ValueError("a negative token id")
    if not np.isfinite(segment.logprobs).all():
        raise ValueError("a logprob that is not finite")
    if not np.array_equal(segment.token_versions() >= 0, segment.loss_mask):
        raise ValueError("version spans and loss mask differ")
    return segment


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Pack one trajectory; `decode_trajectory` gives it back bit for bit."""
    t = trajectory
    body = [
        t.group_id,
        t.index,
        t.attempt,
        t.tag,
        t.seed,
        [_segment_body(segment) for segment in t.segments],
        [[turn.segment, turn.start, turn.end, turn.reward, turn.state_hash] for turn in t.turns],
        t.stop_reason.value,
        t.metrics,
        t.worker_id,
        t.duration_s,
        list(t.text),
    ]
    return _pack("trajectory", body)


def decode_trajectory(blob: bytes) -> Trajectory:
    """Unpack and check one trajectory.

    Raises:
        CodecError: the blob is truncated, of another schema, or breaks an invariant of `services.schema`.
    """
    body = _unpack("trajectory", blob)
    try:
        group_id, index, attempt, tag, seed, segments, turns, stop, metrics, worker_id, duration_s, text = body
        trajectory = Trajectory(
            group_id=str(group_id),
            index=int(index),
            attempt=int(attempt),
            tag=str(tag),
            seed=int(seed),
            segments=tuple(_segment(segment) for segment in segments),
            turns=tuple(Turn(int(s), int(a), int(b), float(r), str(h)) for s, a, b, r, h in turns),
            stop_reason=StopReason(stop),
            metrics={str(name): float(value) for name, value in metrics.items()},
            worker_id=str(worker_id),
            duration_s=float(duration_s),
            text=tuple(str(part) for part in text),
        )
        _check_turns(trajectory)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        _refuse("trajectory", error)
    return trajectory


def _check_turns(trajectory: Trajectory) -> None:
    for turn in trajectory.turns:
        if not 0 <= turn.segment < len(trajectory.segments):
            raise ValueError(f"turn in segment {turn.segment} of {len(trajectory.segments)}")
        if not 0 <= turn.start < turn.end <= len(trajectory.segments[turn.segment].tokens):
            raise ValueError(f"turn of tokens [{turn.start}, {turn.end}) outside its segment")
        if not np.isfinite(turn.reward):
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
                prompt=tuple(np.frombuffer(prompt, dtype="<i4").tolist()),
                sampling=Sampling(float(temperature), float(top_p), int(top_k), int(max_new), tuple(stops)),
                min_version=int(min_version),
            )
            for request_id, prompt, temperature, top_p, top_k, max_new, stops, min_version in _unpack("requests", blob)
        ]
    except (ValueError, TypeError) as error:
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
            token_ids = tuple(np.frombuffer(tokens, dtype="<i4").tolist())
            out.append(
                Completion(
                    request_id=str(request_id),
                    token_ids=token_ids,
                    logprobs=tuple(np.frombuffer(logprobs, dtype="<f4").tolist()),
                    versions=_spans(versions, len(token_ids)),
                    finish_reason=FinishReason(finish),
                    error=str(error),
                )
            )
    except (ValueError, TypeError) as error:
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
            version=int(version),
            step=int(step),
            epoch=int(epoch),
            transport=str(transport),
            location=str(location),
            digest=str(digest),
            num_bytes=int(num_bytes),
            tensors=tuple(TensorSpec(str(n), str(d), tuple(int(x) for x in s)) for n, d, s in tensors),
            published_at=float(published_at),
            anchor=Anchor(str(anchor[0]), str(anchor[1]), int(anchor[2])) if anchor else None,
        )
    except (ValueError, TypeError) as error:
        _refuse("manifest", error)
