"""Messages as msgpack bytes.

Every blob opens with its kind and schema version, and whatever does not follow the schema raises `CodecError`.
"""

import math
from collections.abc import Sequence

import numpy as np

from services.errors import CodecError
from services.pictures import picture_rows, read_pictures
from services.schema import (
    Anchor,
    Completion,
    FinishReason,
    GenerateRequest,
    Manifest,
    Sampling,
    StopReason,
    TensorSpec,
    Trajectory,
    Turn,
)
from services.segments import read_segment, segment_body
from services.wire import MALFORMED, count, finite, pack, read_logprobs, read_spans, read_tokens, refuse, unpack

STOP_REASONS = {reason.value: reason for reason in StopReason}


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Check and pack one trajectory; `decode_trajectory` gives it back bit for bit.

    Raises:
        CodecError: it breaks an invariant of `services.schema`.
    """
    t = trajectory
    try:
        body = [
            t.group_id,
            count(t.index, "index"),
            count(t.attempt, "attempt"),
            t.tag,
            t.seed,
            [segment_body(segment) for segment in t.segments],
            t.turns,
            StopReason(t.stop_reason).value,
            {name: float(value) for name, value in t.metrics.items()},
            t.worker_id,
            finite(t.duration_s, "duration"),
            t.text,
            t.baseline,
        ]
        _check_turns(t)
        return pack("trajectory", body)
    except MALFORMED as error:
        refuse("trajectory", error)


def decode_trajectory(blob: bytes) -> Trajectory:
    """Unpack and check one trajectory.

    Raises:
        CodecError: the blob is truncated, of another schema, or breaks an invariant of `services.schema`.
    """
    body = unpack("trajectory", blob)
    try:
        group_id, index, attempt, tag, seed, segments, turns, stop, metrics, worker_id, duration_s, text, baseline = (
            body
        )
        trajectory = Trajectory(
            group_id=str(group_id),
            index=count(index, "index"),
            attempt=count(attempt, "attempt"),
            tag=str(tag),
            seed=int(seed),
            segments=tuple([read_segment(segment) for segment in segments]),
            turns=tuple([tuple.__new__(Turn, (s, a, b, float(r), str(h))) for s, a, b, r, h in turns]),
            stop_reason=STOP_REASONS[stop],
            metrics={str(name): float(value) for name, value in metrics.items()},
            worker_id=str(worker_id),
            duration_s=finite(duration_s, "duration"),
            text=tuple(map(str, text)),
            baseline=bool(baseline),
        )
        _check_turns(trajectory)
    except MALFORMED as error:
        refuse("trajectory", error)
    return trajectory


def encode_trajectories(trajectories: Sequence[Trajectory]) -> bytes:
    """Pack several, as a file keeps them."""
    return pack("trajectories", [encode_trajectory(trajectory) for trajectory in trajectories])


def decode_trajectories(blob: bytes) -> list[Trajectory]:
    """Unpack `encode_trajectories`. Raises `CodecError` as `decode_trajectory` does."""
    body = unpack("trajectories", blob)
    if not isinstance(body, list) or not all(isinstance(part, bytes) for part in body):
        raise CodecError("malformed trajectories message: not a list of blobs")
    return [decode_trajectory(part) for part in body]


def _check_turns(trajectory: Trajectory) -> None:
    lengths = [len(segment.tokens) for segment in trajectory.segments]
    for segment, start, end, reward, _ in trajectory.turns:
        if not type(segment) is type(start) is type(end) is int:
            raise TypeError(f"turn of tokens [{start}, {end}) in segment {segment}: not whole numbers")
        if not 0 <= segment < len(lengths):
            raise ValueError(f"turn in segment {segment} of {len(lengths)}")
        if not 0 <= start < end <= lengths[segment]:
            raise ValueError(f"turn of tokens [{start}, {end}) outside its segment")
        if not math.isfinite(reward):
            raise ValueError(f"reward {reward}")


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
    return pack("requests", rows)


def decode_requests(blob: bytes) -> list[GenerateRequest]:
    """Unpack `encode_requests`. Raises `CodecError` as `decode_trajectory` does."""
    try:
        return [
            GenerateRequest(
                request_id=str(request_id),
                prompt=tuple(read_tokens(prompt).tolist()),
                sampling=Sampling(
                    finite(temperature, "temperature"),
                    finite(top_p, "top_p"),
                    int(top_k),
                    count(max_new, "max_new_tokens"),
                    tuple(count(stop, "stop token") for stop in stops),
                ),
                min_version=count(min_version, "min_version"),
                pictures=read_pictures(pictures, len(prompt) // 4),
            )
            for request_id, prompt, temperature, top_p, top_k, max_new, stops, min_version, pictures in unpack(
                "requests", blob
            )
        ]
    except MALFORMED as error:
        refuse("requests", error)


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
    return pack("completions", rows)


def decode_completions(blob: bytes) -> list[Completion]:
    """Unpack `encode_completions`. Raises `CodecError` as `decode_trajectory` does."""
    try:
        out: list[Completion] = []
        for request_id, tokens, logprobs, versions, finish, error in unpack("completions", blob):
            token_ids = tuple(read_tokens(tokens).tolist())
            sampled = tuple(read_logprobs(logprobs).tolist())
            if len(sampled) != len(token_ids):
                raise ValueError(f"{len(token_ids)} tokens and {len(sampled)} logprobs")
            out.append(
                Completion(
                    request_id=str(request_id),
                    token_ids=token_ids,
                    logprobs=sampled,
                    versions=read_spans(versions, len(token_ids)),
                    finish_reason=FinishReason(finish),
                    error=str(error),
                )
            )
    except MALFORMED as error:
        refuse("completions", error)
    return out


def encode_manifest(manifest: Manifest) -> bytes:
    """Pack one weight version's manifest."""
    m = manifest
    return pack(
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
    body = unpack("manifest", blob)
    try:
        run_id, version, step, epoch, transport, location, digest, num_bytes, tensors, published_at, anchor = body
        return Manifest(
            run_id=str(run_id),
            version=count(version, "version"),
            step=count(step, "step"),
            epoch=count(epoch, "epoch"),
            transport=str(transport),
            location=str(location),
            digest=str(digest),
            num_bytes=count(num_bytes, "num_bytes"),
            tensors=tuple(TensorSpec(str(n), str(d), tuple(count(x, "dimension") for x in s)) for n, d, s in tensors),
            published_at=finite(published_at, "published_at"),
            anchor=Anchor(str(anchor[0]), str(anchor[1]), count(anchor[2], "num_bytes")) if anchor else None,
        )
    except MALFORMED as error:
        refuse("manifest", error)
