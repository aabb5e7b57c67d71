import hashlib
import math
from array import array
from collections.abc import Sequence
from typing import Any, cast

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.services.errors import CodecError
from offbeat.services.messages import codec
from offbeat.services.messages.types import (
    BaseVersion,
    Completion,
    FinishReason,
    GenerateRequest,
    Manifest,
    PromptImage,
    Sampling,
    Segment,
    StopReason,
    TensorSpec,
    Trajectory,
    Turn,
    VersionSpan,
)
from tests.copying import replace


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
    with pytest.raises(CodecError, match="differ"):
        codec.encode_trajectory(Trajectory("g", 0, 0, "t", 0, (segment,), (), StopReason.TERMINATED))


def test_a_logprob_of_an_unsampled_token_is_refused():
    sent = trajectory()
    logprobs = sent.segments[0].logprobs.copy()
    logprobs[0] = -1.0
    with pytest.raises(CodecError, match="did not sample"):
        codec.encode_trajectory(replace(sent, segments=(replace(sent.segments[0], logprobs=logprobs),)))


@pytest.mark.parametrize("largest", [10, 65_535, 65_536, 2**31 - 1])
@pytest.mark.parametrize("step", [1, 2])
def test_token_ids_of_any_size_come_back_from_as_few_bytes_as_hold_them(largest: int, step: int):
    sent = trajectory()
    tokens = np.full(11 * step, largest, dtype=np.int32)[::step]
    sent = replace(sent, segments=(replace(sent.segments[0], tokens=tokens),))
    blob = codec.encode_trajectory(sent)
    assert codec.decode_trajectory(blob).segments[0].tokens.tolist() == [largest] * 11
    assert len(blob) == len(codec.encode_trajectory(trajectory())) + (0 if largest < 2**16 else 2 * 11)


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (1, b"\0" * 21, "bytes of tokens"),
        (1, b"\0" * 33, "bytes of tokens"),
        (2, b"\0" * 16, "sampled tokens and 4 logprobs"),
        (2, b"\0" * 24, "sampled tokens and 6 logprobs"),
        (3, [[2, 4, 3], [4, 5, 4]], "3 sampled tokens"),
        (0, 12, "bytes of tokens"),
    ],
)
def test_parts_of_a_segment_that_do_not_fit_each_other_are_refused(place: int, value: Any, why: str):
    import msgpack

    tree = msgpack.unpackb(codec.encode_trajectory(trajectory()))
    tree[2][5][0][place] = value
    with pytest.raises(CodecError, match=why):
        codec.decode_trajectory(cast(bytes, msgpack.packb(tree)))


def test_another_schema_version_is_refused_by_name():
    import msgpack

    with pytest.raises(CodecError, match="schema version 99"):
        codec.decode_trajectory(cast(bytes, msgpack.packb(["trajectory", 99, []])))


def test_tuple_and_array_prompts_encode_to_the_same_bytes():
    prompts: list[Sequence[int]] = [(1, 2, 151_000), (), *(array("i", ids) for ids in [(1, 2, 151_000), ()])]
    blobs = [codec.encode_requests([GenerateRequest("r", prompt, Sampling())]) for prompt in prompts]
    assert blobs[:2] == blobs[2:]
    assert [codec.decode_requests(blob)[0].prompt for blob in blobs[2:]] == [(1, 2, 151_000), ()]


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


PLACES = {"index": 1, "attempt": 2, "segments": 5, "turns": 6, "metrics": 8, "duration_s": 10}
"""In a trajectory's message."""


def decodes(name: str, value: Any) -> bool:
    """Whether a message that says so, whoever wrote it, is read."""
    import msgpack

    tree = msgpack.unpackb(codec.encode_trajectory(trajectory()))
    tree[2][PLACES[name]] = value
    try:
        codec.decode_trajectory(cast(bytes, msgpack.packb(tree)))
    except CodecError:
        return False
    return True


def encodes(broken: Trajectory) -> bool:
    try:
        codec.encode_trajectory(broken)
    except CodecError:
        return False
    return True


SEGMENT_VALUES: dict[str, list[Any]] = {
    "tokens": [np.full(11, -1, np.int32), np.arange(10, dtype=np.int32), np.arange(11, dtype=np.int32)[::-1]],
    "loss_mask": [np.ones(11, np.bool_), np.zeros(10, np.bool_), np.zeros(11, np.bool_)],
    "logprobs": [
        np.full(11, math.nan, np.float32),
        np.full(11, -math.inf, np.float32),
        np.full(11, 3e38, np.float32),
        np.zeros(12, np.float32),
        np.zeros(22, np.float32)[::2],
    ],
    "versions": [
        (),
        (VersionSpan(2, 5, 0), VersionSpan(4, 9, 0)),
        (VersionSpan(2, 5, -1), VersionSpan(7, 9, 0)),
        (VersionSpan(2, 5, 1 << 63), VersionSpan(7, 9, 0)),
        (VersionSpan(2, 5, 1.0), VersionSpan(7, 9, 0)),  # type: ignore[arg-type]
        (VersionSpan(2, 5, 1), VersionSpan(7, 12, 0)),
        (VersionSpan(2, 5, 9), VersionSpan(7, 9, 9)),
    ],
}
VALUES: dict[str, list[Any]] = {
    "index": [-1, 0, (1 << 63) - 1],
    "attempt": [-1, 2],
    "duration_s": [math.nan, math.inf, 3],
    "metrics": [{}, {"success": 1}, {"success": "much"}],
    "turns": [
        (),
        (Turn(1, 2, 5, 0.0),),
        (Turn(0, 5, 5, 0.0),),
        (Turn(0, 5, 12, 0.0),),
        (Turn(0, 2, 5, math.nan),),
        (Turn(0.0, 2, 5, 0.0),),  # type: ignore[arg-type]
        (Turn(0, 2, 5, 1),),
    ],
    "segments": [()],
}


@given(st.sampled_from([(name, i) for name, values in VALUES.items() for i in range(len(values))]))
def test_the_encoder_refuses_the_trajectories_that_the_decoder_does(place: tuple[str, int]):
    name, i = place
    assert encodes(replace(trajectory(), **{name: VALUES[name][i]})) == decodes(name, VALUES[name][i])


def test_what_msgpack_has_no_word_for_is_refused_with_a_codec_error():
    assert not encodes(replace(trajectory(), seed=1 << 64))
    assert not encodes(replace(trajectory(), worker_id=object()))


def test_numbers_of_numpy_come_back_as_plain_ones():
    sent = replace(trajectory(), turns=(Turn(0, 2, 5, cast(float, np.float32(0.5))),), seed=np.int64(7))
    got = codec.decode_trajectory(codec.encode_trajectory(sent))
    assert (type(got.seed), got.seed) == (int, 7)
    assert (type(got.reward), got.reward) == (float, 0.5)


@given(st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in SEGMENT_VALUES.items()}))
def test_a_segment_that_is_not_refused_comes_back_as_it_was(parts: dict[str, Any]):
    sound = trajectory()
    segment = replace(sound.segments[0], **parts)
    sent = replace(sound, segments=(segment,))
    if encodes(sent):
        (got,) = codec.decode_trajectory(codec.encode_trajectory(sent)).segments
        assert got.versions == segment.versions
        for name in ("tokens", "loss_mask", "logprobs"):
            assert np.array_equal(getattr(got, name), getattr(segment, name))
    else:
        assert parts


@pytest.mark.parametrize(
    "parts",
    [
        {"tokens": np.arange(11, dtype=np.int64)},
        {"loss_mask": np.zeros(11, np.int8)},
        {"logprobs": np.zeros(11, np.float64)},
        {"tokens": np.zeros((11, 1), np.int32)},
    ],
)
def test_arrays_of_a_type_that_would_be_truncated_are_refused(parts: dict[str, Any]):
    sound = trajectory()
    assert not encodes(replace(sound, segments=(replace(sound.segments[0], **parts),)))


TRAJECTORY_OF_VERSION_0_2 = (
    "93aa7472616a6563746f7279039da1670100a374616705919508c4100000282350467869a08cc8aff0d218f6c410000000bf000000bf000000"
    "bf000000bf919304080391930102c40889504e470d0a1a0a9195000408cb3ff0000000000000a173aa7465726d696e6174656481a773756363"
    "657373cb3ff0000000000000a177cb3ff800000000000091a161c3"
)


def test_trajectories_without_truncation_of_turns_or_error_are_read() -> None:
    decoded = codec.decode_trajectory(bytes.fromhex(TRAJECTORY_OF_VERSION_0_2))
    assert decoded.error == ""
    assert decoded.turns == (Turn(0, 4, 8, 1.0, "s", is_truncated=False),)


TRAJECTORY_BEFORE_TRACES = (
    "93aa7472616a6563746f7279039ea1670100a374616705919508c4100000282350467869a08cc8aff0d218f6c410000000bf000000bf000000"
    "bf000000bf919304080391930102c40889504e470d0a1a0a9196000408cb3ff0000000000000a173c2aa7465726d696e6174656481a7737563"
    "63657373cb3ff0000000000000a177cb3ff800000000000091a161c3a0"
)


def test_trajectories_without_a_traceparent_are_read_and_it_is_kept() -> None:
    blob = bytes.fromhex(TRAJECTORY_BEFORE_TRACES)
    assert hashlib.sha256(blob).hexdigest()[:16] == "7189382ac5fea384"  # as that build wrote it
    decoded = codec.decode_trajectory(blob)
    assert decoded.traceparent == ""
    traced = replace(decoded, traceparent=f"00-{1:032x}-{2:016x}-01")
    assert codec.decode_trajectory(codec.encode_trajectory(traced)).traceparent == traced.traceparent


@pytest.mark.parametrize("continues", [True, False])
def test_the_id_of_a_request_says_whether_it_continues_its_episode(continues: bool) -> None:
    name = codec.request_id("e", 7, continues=continues)
    request = GenerateRequest(name, [5], Sampling(), episode="e", continues=continues, group="g")
    (decoded,) = codec.decode_requests(codec.encode_requests([request]))
    assert (decoded.request_id, decoded.continues) == (name, continues)
    assert decoded.episode == ("e" if continues else "")


def test_only_requests_with_stop_strings_carry_them() -> None:
    """Requests without have the fields of earlier builds, which refuse others."""
    stopping = GenerateRequest("r", (5, 6), Sampling(stop_strings=("</a>", "b")), num_answered=1)
    plain = replace(stopping, sampling=Sampling())
    blobs = [codec.encode_requests([each]) for each in (stopping, plain)]
    assert codec.decode_requests(blobs[0]) == [stopping]
    assert codec.decode_requests(blobs[1]) == [replace(plain, num_answered=0)]
    assert [len(msgpack.unpackb(blob)[2][0]) for blob in blobs] == [11, 9]
    for bad in (replace(stopping, sampling=Sampling(stop_strings=("",))), replace(stopping, num_answered=3)):
        with pytest.raises(CodecError):
            codec.decode_requests(codec.encode_requests([bad]))


def test_messages_have_the_bytes_of_schema_3() -> None:
    """Runs stored by earlier builds are read and written by this one."""
    tokens = np.arange(8, dtype=np.int32) * 9000
    mask = np.arange(8) >= 4
    logprobs = np.where(mask, np.float32(-0.5), np.float32(0))
    image = PromptImage(1, 2, b"\x89PNG\r\n\x1a\n")
    segment = Segment(tokens, mask, logprobs, (VersionSpan(4, 8, 3),), (image,))
    turns = (Turn(0, 4, 8, 1.0, "s"),)
    trajectory = Trajectory(
        "g", 1, 0, "tag", 5, (segment,), turns, StopReason.TERMINATED, {"success": 1.0}, "w", 1.5, ("a",), True
    )
    base = BaseVersion("/base", "blake2b:1", 9)
    tensors = (TensorSpec("w", "bfloat16", (2, 3)),)
    manifest = Manifest("r", 3, 3, 1, "shm", "/x", "blake2b:0", 10, tensors, 1.5, base)
    request = GenerateRequest("r", [5, 6, 7], Sampling(0.5, 1.0, -1, 8, (2,)), 3, (image,))
    completion = Completion("r", (1, 2), (-0.5, -0.25), (VersionSpan(0, 2, 3),), FinishReason.LENGTH)
    blobs = (
        codec.encode_trajectory(trajectory),
        codec.encode_manifest(manifest),
        codec.encode_requests([request]),
        codec.encode_completions([completion]),
    )
    digests = [hashlib.sha256(blob).hexdigest()[:16] for blob in blobs]
    assert digests == ["0a034130519fc581", "7f641e814f5b9638", "2d4bcfd81299a4cf", "5b90c48c3de230d0"]
