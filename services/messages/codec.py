"""Messages as msgpack bytes.

Every blob starts with its kind and schema version; anything that does not follow the schema raises `CodecError`. The
rows here are the wire format; `offbeat.services.messages.types` has the messages.
"""

import math
from collections.abc import Sequence

import numpy as np

from offbeat.services.messages.envelope import (
    MALFORMED,
    Count,
    MessageFormat,
    MessageRow,
    check_spans,
    count,
    finite,
    read_logprobs,
    read_tokens,
)
from offbeat.services.messages.images import PictureRow, picture_rows, read_pictures
from offbeat.services.messages.segments import SegmentRow, read_segment, segment_row
from offbeat.services.messages.types import (
    BaseVersion,
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


class TrajectoryRow(MessageRow):
    """A trajectory as messages carry it: field for field."""

    group_id: str
    index: Count
    attempt: Count
    tag: str
    seed: int
    segments: list[SegmentRow]
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    metrics: dict[str, float]
    worker_id: str
    duration_s: float
    text: tuple[str, ...]
    baseline: bool


TRAJECTORY = MessageFormat("trajectory", TrajectoryRow)
TRAJECTORIES = MessageFormat("trajectories", list[bytes])


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Check and pack one trajectory; `decode_trajectory` gives it back bit for bit.

    Raises:
        CodecError: it breaks an invariant of `offbeat.services.messages.types`.
    """
    t = trajectory
    try:
        _check_turns(t.turns, t.segments)
        row = TrajectoryRow(
            t.group_id,
            count(t.index, "index"),
            count(t.attempt, "attempt"),
            t.tag,
            t.seed,
            [segment_row(segment) for segment in t.segments],
            t.turns,
            StopReason(t.stop_reason),
            {name: float(value) for name, value in t.metrics.items()},
            t.worker_id,
            finite(t.duration_s, "duration"),
            t.text,
            t.baseline,
        )
    except MALFORMED as error:
        TRAJECTORY.refuse(error)
    return TRAJECTORY.pack(row)


def decode_trajectory(blob: bytes) -> Trajectory:
    """Unpack and check one trajectory.

    Raises:
        CodecError: the blob is truncated, of another schema, or breaks an invariant of `offbeat.services.messages.types`.
    """
    row = TRAJECTORY.unpack(blob)
    try:
        segments = tuple([read_segment(segment) for segment in row.segments])
        _check_turns(row.turns, segments)
        finite(row.duration_s, "duration")
    except MALFORMED as error:
        TRAJECTORY.refuse(error)
    return Trajectory(
        row.group_id,
        row.index,
        row.attempt,
        row.tag,
        row.seed,
        segments,
        row.turns,
        row.stop_reason,
        row.metrics,
        row.worker_id,
        row.duration_s,
        row.text,
        row.baseline,
    )


def encode_trajectories(trajectories: Sequence[Trajectory]) -> bytes:
    """Pack several, as a file keeps them. Raises `CodecError` as `encode_trajectory` does."""
    return TRAJECTORIES.pack([encode_trajectory(trajectory) for trajectory in trajectories])


def decode_trajectories(blob: bytes) -> list[Trajectory]:
    """Unpack `encode_trajectories`. Raises `CodecError` as `decode_trajectory` does."""
    return [decode_trajectory(part) for part in TRAJECTORIES.unpack(blob)]


def _check_turns(turns: Sequence[Turn], segments: Sequence[Segment]) -> None:
    lengths = [len(segment.tokens) for segment in segments]
    for segment, start, end, reward, _ in turns:
        if not type(segment) is type(start) is type(end) is int:
            raise TypeError(f"turn of tokens [{start}, {end}) in segment {segment}: not whole numbers")
        if not 0 <= segment < len(lengths):
            raise ValueError(f"turn in segment {segment} of {len(lengths)}")
        if not 0 <= start < end <= lengths[segment]:
            raise ValueError(f"turn of tokens [{start}, {end}) outside its segment")
        if not math.isfinite(reward):
            raise ValueError(f"reward {reward}")


class RequestRow(MessageRow):
    """A turn to sample as messages carry it."""

    request_id: str
    prompt: bytes
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: Count
    stop_token_ids: tuple[Count, ...]
    min_version: Count
    pictures: list[PictureRow]


class CompletionRow(MessageRow):
    """A sampled turn as messages carry it."""

    request_id: str
    token_ids: bytes
    logprobs: bytes
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    error: str


REQUESTS = MessageFormat("requests", list[RequestRow])
COMPLETIONS = MessageFormat("completions", list[CompletionRow])


def encode_requests(requests: Sequence[GenerateRequest]) -> bytes:
    """Pack the turns that one call carries."""
    rows = [
        RequestRow(
            r.request_id,
            np.asarray(r.prompt, dtype="<i4").tobytes(),
            r.sampling.temperature,
            r.sampling.top_p,
            r.sampling.top_k,
            r.sampling.max_new_tokens,
            r.sampling.stop_token_ids,
            r.min_version,
            picture_rows(r.pictures),
        )
        for r in requests
    ]
    return REQUESTS.pack(rows)


def decode_requests(blob: bytes) -> list[GenerateRequest]:
    """Unpack `encode_requests`. Raises `CodecError` as `decode_trajectory` does."""
    rows = REQUESTS.unpack(blob)
    try:
        return [_request(row) for row in rows]
    except MALFORMED as error:
        REQUESTS.refuse(error)


def _request(row: RequestRow) -> GenerateRequest:
    prompt = tuple(read_tokens(row.prompt).tolist())
    sampling = Sampling(
        finite(row.temperature, "temperature"),
        finite(row.top_p, "top_p"),
        row.top_k,
        row.max_new_tokens,
        row.stop_token_ids,
    )
    pictures = read_pictures(row.pictures, len(prompt))
    return GenerateRequest(row.request_id, prompt, sampling, row.min_version, pictures)


def encode_completions(completions: Sequence[Completion]) -> bytes:
    """Pack the completions that one answer carries."""
    rows = [
        CompletionRow(
            c.request_id,
            np.asarray(c.token_ids, dtype="<i4").tobytes(),
            np.asarray(c.logprobs, dtype="<f4").tobytes(),
            c.versions,
            c.finish_reason,
            c.error,
        )
        for c in completions
    ]
    return COMPLETIONS.pack(rows)


def decode_completions(blob: bytes) -> list[Completion]:
    """Unpack `encode_completions`. Raises `CodecError` as `decode_trajectory` does."""
    rows = COMPLETIONS.unpack(blob)
    try:
        return [_completion(row) for row in rows]
    except MALFORMED as error:
        COMPLETIONS.refuse(error)


def _completion(row: CompletionRow) -> Completion:
    token_ids = tuple(read_tokens(row.token_ids).tolist())
    logprobs = tuple(read_logprobs(row.logprobs).tolist())
    if len(logprobs) != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens and {len(logprobs)} logprobs")
    check_spans(row.versions, len(token_ids))
    return Completion(row.request_id, token_ids, logprobs, row.versions, row.finish_reason, row.error)


class TensorRow(MessageRow):
    """A tensor's specification as messages carry it."""

    name: str
    dtype: str
    shape: tuple[Count, ...]


class AnchorRow(MessageRow):
    """An anchor as messages carry it."""

    location: str
    digest: str
    num_bytes: Count


class ManifestRow(MessageRow):
    """A manifest as messages carry it."""

    run_id: str
    version: Count
    step: Count
    epoch: Count
    transport: str
    location: str
    digest: str
    num_bytes: Count
    tensors: list[TensorRow]
    published_at: float
    anchor: AnchorRow | None


MANIFEST = MessageFormat("manifest", ManifestRow)


def encode_manifest(manifest: Manifest) -> bytes:
    """Pack one weight version's manifest."""
    m = manifest
    return MANIFEST.pack(
        ManifestRow(
            m.run_id,
            m.version,
            m.step,
            m.epoch,
            m.transport,
            m.location,
            m.digest,
            m.num_bytes,
            [TensorRow(t.name, t.dtype, t.shape) for t in m.tensors],
            m.published_at,
            AnchorRow(m.anchor.location, m.anchor.digest, m.anchor.num_bytes) if m.anchor else None,
        )
    )


def decode_manifest(blob: bytes) -> Manifest:
    """Unpack `encode_manifest`. Raises `CodecError` as `decode_trajectory` does."""
    row = MANIFEST.unpack(blob)
    try:
        finite(row.published_at, "published_at")
    except MALFORMED as error:
        MANIFEST.refuse(error)
    anchor = row.anchor
    return Manifest(
        row.run_id,
        row.version,
        row.step,
        row.epoch,
        row.transport,
        row.location,
        row.digest,
        row.num_bytes,
        tuple(TensorSpec(tensor.name, tensor.dtype, tensor.shape) for tensor in row.tensors),
        row.published_at,
        BaseVersion(anchor.location, anchor.digest, anchor.num_bytes) if anchor else None,
    )
