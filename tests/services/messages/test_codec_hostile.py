"""Hostile messages: whatever is put in whatever place of a message is refused by a CodecError, or what is read keeps every
invariant of its schema. `OFFBEAT_FUZZ_EXAMPLES` sets how many are tried."""

import math
import os
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offbeat.services.errors import CodecError
from offbeat.services.messages import codec, envelope
from offbeat.services.messages.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Manifest,
    Sampling,
    TensorSpec,
    Trajectory,
    VersionSpan,
)
from tests.fakes import make_trajectory

pytestmark = pytest.mark.slow

MANY = settings(max_examples=int(os.environ.get("OFFBEAT_FUZZ_EXAMPLES", "400")))
BLOBS = {
    "trajectory": codec.encode_trajectory(make_trajectory(3, 1, reward=1.0, version=2, text=("a", "b"))),
    "requests": codec.encode_requests(
        [
            GenerateRequest("r", (1, 2), Sampling(0.5, 0.9, 5, 3, (7,)), 4),
            GenerateRequest("s", (1, 2), Sampling(stop_strings=("</a>",)), num_answered=1),
        ]
    ),
    "completions": codec.encode_completions(
        [Completion("r", (5, 7), (-0.5, -0.25), (VersionSpan(0, 2, 4),), FinishReason.STOP)]
    ),
    "manifest": codec.encode_manifest(
        Manifest("run", 3, 3, 1, "shm", "/dev/shm/x", "d", 10, (TensorSpec("w", "float32", (2, 3)),), 1.5)
    ),
}
DECODE = {kind: getattr(codec, f"decode_{kind}") for kind in BLOBS}

floats = st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -0.0])
numbers = st.sampled_from([-1, 0, 1, 2**31, 2**32, 2**63 - 1, 2**64 - 1, -(2**63)])
arrays = st.sampled_from(
    [b"", b"\xff" * 4, b"\x00" * 3, np.full(13, np.nan, "<f4").tobytes(), np.full(13, -5, "<i4").tobytes(), b"\xff" * 2]
)
hostile = st.recursive(
    floats | numbers | arrays | st.none() | st.booleans() | st.text(max_size=5) | st.binary(max_size=60),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=3), values, max_size=2),
    max_leaves=6,
)


def places(tree: Any, before: tuple[int | str, ...] = ()) -> Iterator[tuple[int | str, ...]]:
    """Of every node below the root."""
    children = enumerate(tree) if isinstance(tree, list) else tree.items() if isinstance(tree, dict) else ()
    for key, value in children:
        yield (*before, key)
        yield from places(value, (*before, key))


def put(tree: Any, place: tuple[int | str, ...], value: Any) -> Any:
    """The tree with another value there."""
    if not place:
        return value
    copy = list(tree) if isinstance(tree, list) else dict(tree)
    copy[place[0]] = put(copy[place[0]], place[1:], value)
    return copy


def keeps_its_promises(message: Any) -> None:
    if isinstance(message, Trajectory):
        assert message.index >= 0
        assert math.isfinite(message.reward)
        for segment in message.segments:
            assert len(segment.tokens) == len(segment.loss_mask) == len(segment.logprobs)
            assert np.array_equal(segment.token_versions() >= 0, segment.loss_mask)
            assert np.isfinite(segment.logprobs).all()
            assert not len(segment.tokens) or segment.tokens.min() >= 0
        for turn in message.turns:
            assert 0 <= turn.start < turn.end <= len(message.segments[turn.segment].tokens)
    elif isinstance(message, Manifest):
        assert min(message.version, message.step, message.epoch, message.num_bytes) >= 0
    else:
        for part in message:
            if isinstance(part, Completion):
                assert len(part.token_ids) == len(part.logprobs)
                assert all(math.isfinite(logprob) for logprob in part.logprobs)
                assert min(part.token_ids, default=0) >= 0
            else:
                assert min(part.prompt, default=0) >= 0
                assert math.isfinite(part.sampling.temperature)


@pytest.mark.parametrize("kind", BLOBS)
@MANY
@given(data=st.data())
def test_any_value_in_any_place_is_refused_or_harmless(kind: str, data: st.DataObject):
    tree = msgpack.unpackb(BLOBS[kind])
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(list(places(tree))))
        tree = put(tree, place, data.draw(hostile))
    try:
        message = DECODE[kind](msgpack.packb(tree))
    except CodecError:
        return
    keeps_its_promises(message)


@pytest.mark.parametrize("kind", BLOBS)
@MANY
@given(
    position=st.integers(0, 2000),
    size=st.sampled_from([b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff"]),
)
@example(position=0, size=b"\xdd\xff\xff\xff\xff")
def test_a_size_that_was_made_up_allocates_nothing(kind: str, position: int, size: bytes):
    blob = BLOBS[kind]
    place = position % len(blob)
    with pytest.raises(CodecError):
        DECODE[kind](blob[:place] + size + blob[place + 1 :])


@pytest.mark.parametrize("kind", BLOBS)
def test_nothing_is_read_of_a_blob_that_is_too_short_or_too_long(kind: str):
    blob = BLOBS[kind]
    for cut in range(len(blob)):
        with pytest.raises(CodecError):
            DECODE[kind](blob[:cut])
    with pytest.raises(CodecError):
        DECODE[kind](blob + b"\x00")


def test_deep_nesting_is_refused():
    with pytest.raises(CodecError):
        codec.decode_trajectory(b"\x91" * 100_000 + b"\xc0")


def test_a_message_that_is_too_large_is_refused_unread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(envelope, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(CodecError, match="more than 100"):
        codec.decode_trajectory(BLOBS["trajectory"] * 3)
