import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services import codec
from services.errors import CodecError
from services.schema import (
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


def trajectory(length: int = 11) -> Trajectory:
    mask = np.zeros(length, dtype=np.bool_)
    mask[2:5] = True
    mask[7:9] = True
    logprobs = np.where(mask, -0.5, 0.0).astype(np.float32)
    spans = (VersionSpan(2, 4, 3), VersionSpan(4, 5, 4), VersionSpan(7, 9, 5))
    segment = Segment(np.arange(length, dtype=np.int32), mask, logprobs, spans)
    turns = (Turn(0, 2, 5, 0.0, "a"), Turn(0, 7, 9, 1.0, "b"))
    return Trajectory(
        "g7", 1, 0, "lake", 5, (segment,), turns, StopReason.TERMINATED, {"success": 1.0}, "w", 0.25, ("x",)
    )


def test_a_trajectory_comes_back_bit_for_bit():
    sent = trajectory()
    got = codec.decode_trajectory(codec.encode_trajectory(sent))
    assert np.array_equal(got.segments[0].tokens, sent.segments[0].tokens)
    assert np.array_equal(got.segments[0].loss_mask, sent.segments[0].loss_mask)
    assert np.array_equal(got.segments[0].logprobs, sent.segments[0].logprobs)
    assert got.segments[0].versions == sent.segments[0].versions
    assert (got.turns, got.metrics, got.text, got.stop_reason) == (
        sent.turns,
        sent.metrics,
        sent.text,
        sent.stop_reason,
    )
    assert got.version_range() == (3, 5)
    assert got.reward == 1.0


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_with_a_codec_error(blob: bytes):
    for decode in (codec.decode_trajectory, codec.decode_requests, codec.decode_completions, codec.decode_manifest):
        with pytest.raises(CodecError):
            decode(blob)


@given(st.integers(min_value=0), st.integers(0, 255))
def test_a_damaged_trajectory_is_refused_or_still_keeps_its_invariants(position: int, byte: int):
    blob = bytearray(codec.encode_trajectory(trajectory()))
    blob[position % len(blob)] = byte
    try:
        got = codec.decode_trajectory(bytes(blob))
    except CodecError:
        return
    segment = got.segments[0]
    assert len(segment.tokens) == len(segment.loss_mask) == len(segment.logprobs)
    assert np.array_equal(segment.token_versions() >= 0, segment.loss_mask)
    assert np.isfinite(segment.logprobs).all()


def test_a_truncated_trajectory_is_refused():
    blob = codec.encode_trajectory(trajectory())
    for cut in range(len(blob)):
        with pytest.raises(CodecError):
            codec.decode_trajectory(blob[:cut])


def test_a_mask_that_differs_from_the_version_spans_is_refused():
    broken = trajectory()
    mask = broken.segments[0].loss_mask.copy()
    mask[0] = True
    segment = Segment(broken.segments[0].tokens, mask, broken.segments[0].logprobs, broken.segments[0].versions)
    blob = codec.encode_trajectory(Trajectory("g", 0, 0, "t", 0, (segment,), (), StopReason.TERMINATED))
    with pytest.raises(CodecError, match="differ"):
        codec.decode_trajectory(blob)


def test_another_schema_version_is_refused_by_name():
    import msgpack

    with pytest.raises(CodecError, match="schema version 99"):
        codec.decode_trajectory(msgpack.packb(["trajectory", 99, []]))


def test_requests_completions_and_manifests_come_back():
    requests = [GenerateRequest("r", (1, 2), Sampling(0.0, 0.9, 5, 3, (7,)), min_version=4)]
    assert codec.decode_requests(codec.encode_requests(requests)) == requests
    completions = [
        Completion("r", (5, 7), (-0.5, -0.25), (VersionSpan(0, 2, 4),), FinishReason.STOP),
        Completion("s", error="too long"),
    ]
    assert codec.decode_completions(codec.encode_completions(completions)) == completions
    manifest = Manifest("run", 3, 3, 1, "shm", "/dev/shm/x", "d", 10, (TensorSpec("w", "float32", (2, 3)),), 1.5)
    assert codec.decode_manifest(codec.encode_manifest(manifest)) == manifest
