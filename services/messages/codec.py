"""Messages as msgpack, each with its kind and schema version; violations raise `CodecError`."""

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
from msgspec import structs

from offbeat.services.messages.envelope import (
    MALFORMED,
    MAX_TOKENS,
    MessageFormat,
    check_count,
    check_finite,
    check_spans,
    read_logprobs,
    read_tokens,
)
from offbeat.services.messages.images import check_images
from offbeat.services.messages.routing import PackedRouting, pack_routing, unpack_routing
from offbeat.services.messages.segments import PackedSegment, pack_segment, unpack_segment
from offbeat.services.messages.types import (
    Completion,
    Count,
    FinishReason,
    GenerateRequest,
    Manifest,
    Message,
    PromptImage,
    Sampling,
    Segment,
    StopReason,
    Trajectory,
    Turn,
    VersionSpan,
)

TRAJECTORY = MessageFormat("trajectory", Trajectory[PackedSegment])
TRAJECTORIES = MessageFormat("trajectories", list[bytes])


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Validate and pack, exactly.

    Raises:
        CodecError: a violated invariant of `services.messages.types`.
    """
    t = trajectory
    try:
        _check_turns(t.turns, t.segments)
        _check_seats(t.seats, t.turns)
        packed = Trajectory(
            t.group_id,
            check_count(t.index, "index"),
            check_count(t.attempt, "attempt"),
            t.tag,
            t.seed,
            tuple([pack_segment(segment) for segment in t.segments]),
            t.turns,
            StopReason(t.stop_reason),
            {name: float(value) for name, value in t.metrics.items()},
            t.worker_id,
            check_finite(t.duration_s, "duration"),
            t.text,
            t.baseline,
            t.error,
            t.traceparent,
            t.seats,
        )
    except MALFORMED as error:
        TRAJECTORY.refuse(error)
    # Without seats the field is left out, so that older builds can read it
    return TRAJECTORY.pack(packed if t.seats else structs.astuple(packed)[:-1])


def decode_trajectory(blob: bytes) -> Trajectory:
    """Unpack and validate.

    Raises:
        CodecError: truncated, of another schema, or invalid.
    """
    packed = TRAJECTORY.unpack(blob)
    try:
        segments = tuple([unpack_segment(segment) for segment in packed.segments])
        _check_turns(packed.turns, segments)
        _check_seats(packed.seats, packed.turns)
        check_finite(packed.duration_s, "duration")
    except MALFORMED as error:
        TRAJECTORY.refuse(error)
    return cast(Trajectory, structs.replace(packed, segments=segments))


def encode_trajectories(trajectories: Sequence[Trajectory]) -> bytes:
    return TRAJECTORIES.pack([encode_trajectory(trajectory) for trajectory in trajectories])


def decode_trajectories(blob: bytes) -> list[Trajectory]:
    return [decode_trajectory(part) for part in TRAJECTORIES.unpack(blob)]


def _check_turns(turns: Sequence[Turn], segments: Sequence[Segment]) -> None:
    lengths = [len(segment.tokens) for segment in segments]
    for segment, start, end, reward, *_ in turns:
        if not type(segment) is type(start) is type(end) is int:
            raise TypeError(f"turn of tokens [{start}, {end}) in segment {segment}: not whole numbers")
        if not 0 <= segment < len(lengths):
            raise ValueError(f"turn in segment {segment} of {len(lengths)}")
        if not 0 <= start < end <= lengths[segment]:
            raise ValueError(f"turn of tokens [{start}, {end}) outside its segment")
        if not math.isfinite(reward):
            raise ValueError(f"reward {reward}")


def _check_seats(seats: Sequence[str], turns: Sequence[Turn]) -> None:
    if not seats:
        return
    if len(seats) != len(turns):
        raise ValueError(f"{len(seats)} seats for {len(turns)} turns")
    owners = {(turn.segment, seat) for turn, seat in zip(turns, seats, strict=True)}
    if len(owners) > len({turn.segment for turn in turns}):
        raise ValueError("a segment of several seats")


EPISODE_SEPARATOR = "/"
"""Behind the episode in the id of a request that continues it: `EPISODE/NUMBER`."""


def request_id(episode: str, number: int, *, continues: bool) -> str:
    """Return the id of an episode's request, which carries `continues` to the engine."""
    return f"{episode}{EPISODE_SEPARATOR if continues else '-'}{number}"


class PackedRequest(Message, frozen=True):
    request_id: str
    prompt: bytes
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: Count
    stop_token_ids: tuple[Count, ...]
    min_version: Count
    images: tuple[PromptImage, ...]
    stop_strings: tuple[str, ...] = ()
    num_answered: Count = 0
    routing_start: Count = 0


class PackedCompletion(Message, frozen=True):
    request_id: str
    token_ids: bytes
    logprobs: bytes
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    error: str
    replica_id: str
    routing: PackedRouting | None = None


REQUESTS = MessageFormat("requests", list[PackedRequest])
COMPLETIONS = MessageFormat("completions", list[PackedCompletion])


def encode_requests(requests: Sequence[GenerateRequest]) -> bytes:
    return REQUESTS.pack([_pack_request(request) for request in requests])


def _pack_request(r: GenerateRequest) -> PackedRequest | tuple[object, ...]:
    packed = PackedRequest(
        r.request_id,
        np.asarray(r.prompt, dtype="<i4").tobytes(),
        r.sampling.temperature,
        r.sampling.top_p,
        r.sampling.top_k,
        r.sampling.max_new_tokens,
        r.sampling.stop_token_ids,
        r.min_version,
        r.images,
        r.sampling.stop_strings,
        r.num_answered if r.sampling.stop_strings else 0,
        r.routing_start,
    )
    if r.routing_start:
        return packed
    # Fields without a meaning are left out, so that older builds can read it
    return structs.astuple(packed)[: -1 if r.sampling.stop_strings else -3]


def decode_requests(blob: bytes) -> list[GenerateRequest]:
    rows = REQUESTS.unpack(blob)
    try:
        return [_decode_request(row) for row in rows]
    except MALFORMED as error:
        REQUESTS.refuse(error)


def _decode_request(row: PackedRequest) -> GenerateRequest:
    prompt = tuple(read_tokens(row.prompt).tolist())
    sampling = Sampling(
        check_finite(row.temperature, "temperature"),
        check_finite(row.top_p, "top_p"),
        row.top_k,
        row.max_new_tokens,
        row.stop_token_ids,
        row.stop_strings,
    )
    if not all(row.stop_strings) or row.num_answered > len(prompt):
        raise ValueError(f"stop strings {row.stop_strings}, {row.num_answered} of {len(prompt)} tokens answered")
    if row.routing_start > len(prompt):
        raise ValueError(f"experts from token {row.routing_start} of {len(prompt)}")
    check_images(row.images, len(prompt))
    episode, continues, _ = row.request_id.partition(EPISODE_SEPARATOR)
    return GenerateRequest(
        row.request_id,
        prompt,
        sampling,
        row.min_version,
        row.images,
        episode=episode if continues else "",
        continues=bool(continues),
        num_answered=row.num_answered,
        routing_start=row.routing_start,
    )


def encode_completions(completions: Sequence[Completion]) -> bytes:
    return COMPLETIONS.pack([_pack_completion(completion) for completion in completions])


def _pack_completion(c: Completion) -> PackedCompletion | tuple[object, ...]:
    packed = PackedCompletion(
        c.request_id,
        np.asarray(c.token_ids, dtype="<i4").tobytes(),
        np.asarray(c.logprobs, dtype="<f4").tobytes(),
        c.versions,
        c.finish_reason,
        c.error,
        c.replica_id,
    )
    # Without experts their field is left out, so that older builds can read it
    if c.routing is None:
        return structs.astuple(packed)[:-1]
    return structs.replace(packed, routing=pack_routing(c.routing, MAX_TOKENS))


def decode_completions(blob: bytes) -> list[Completion]:
    rows = COMPLETIONS.unpack(blob)
    try:
        return [_decode_completion(row) for row in rows]
    except MALFORMED as error:
        COMPLETIONS.refuse(error)


def _decode_completion(row: PackedCompletion) -> Completion:
    token_ids = tuple(read_tokens(row.token_ids).tolist())
    logprobs = tuple(read_logprobs(row.logprobs).tolist())
    if len(logprobs) != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens and {len(logprobs)} logprobs")
    check_spans(row.versions, len(token_ids))
    routing = None if row.routing is None else unpack_routing(row.routing, MAX_TOKENS)
    head = row.request_id, token_ids, logprobs, row.versions, row.finish_reason, row.error, row.replica_id
    return Completion(*head, routing=routing)


MANIFEST = MessageFormat("manifest", Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    return MANIFEST.pack(manifest)


def decode_manifest(blob: bytes) -> Manifest:
    manifest = MANIFEST.unpack(blob)
    try:
        check_finite(manifest.published_at, "published_at")
    except MALFORMED as error:
        MANIFEST.refuse(error)
    return manifest
