from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from offbeat.services.errors import CodecError
from offbeat.services.messages import codec
from offbeat.services.messages.routing import PackedRouting, unpack_routing
from offbeat.services.messages.types import (
    Completion,
    GenerateRequest,
    Sampling,
    Segment,
    StopReason,
    Trajectory,
    Turn,
    VersionSpan,
)


def experts(rows: int, dtype: Any = np.uint8) -> Any:
    return np.arange(rows * 6, dtype=dtype).reshape(rows, 3, 2)


def trajectory(routing: Any) -> Trajectory:
    mask = np.arange(5) >= 3
    logprobs = np.where(mask, -0.5, 0.0).astype(np.float32)
    segment = Segment(np.arange(5, dtype=np.int32), mask, logprobs, (VersionSpan(3, 5, 1),), (), routing)
    return Trajectory("g", 0, 0, "t", 1, (segment,), (Turn(0, 3, 5, 1.0),), StopReason.TERMINATED)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_experts_come_back_with_trajectories_and_completions(dtype: Any) -> None:
    sent = experts(4, dtype)
    routing = codec.decode_trajectory(codec.encode_trajectory(trajectory(sent))).segments[0].routing
    assert routing is not None
    assert routing.dtype == dtype
    assert np.array_equal(routing, sent)
    completion = Completion("r", (7, 8), (-1.0, -1.0), (VersionSpan(0, 2, 1),), routing=sent)
    (got,) = codec.decode_completions(codec.encode_completions([completion]))
    assert got == completion
    assert np.array_equal(got.routing, sent)  # type: ignore[arg-type]


def test_a_token_takes_a_byte_per_layer_and_expert() -> None:
    one, four = (len(codec.encode_trajectory(trajectory(experts(rows)))) for rows in (1, 4))
    assert four - one == 3 * 3 * 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"width": 3}, "experts of 3 bytes"),
        ({"experts": b"12345"}, "5 bytes of experts, 6 per token"),
        ({"layers": 0}, "0 per token"),
        ({"experts": bytes(36)}, "for at most 5 tokens"),
    ],
)
def test_rows_that_do_not_fit_are_refused(change: dict[str, Any], says: str) -> None:
    packed = structs.replace(PackedRouting(3, 2, 1, bytes(24)), **change)
    with pytest.raises(ValueError, match=says):
        unpack_routing(packed, 5)


@pytest.mark.parametrize("routing", [experts(6), experts(4, np.int32), experts(4)[0], experts(0)[:, :0]])
def test_the_encoder_refuses_other_arrays(routing: Any) -> None:
    with pytest.raises(CodecError):
        codec.encode_trajectory(trajectory(routing))


@pytest.mark.parametrize("stop_strings", [(), ("</a>",)])
def test_a_request_says_from_which_token_on_it_wants_experts(stop_strings: tuple[str, ...]) -> None:
    request = GenerateRequest("r", (5, 6, 7), Sampling(stop_strings=stop_strings), routing_start=2)
    (got,) = codec.decode_requests(codec.encode_requests([request]))
    assert got == request
    plain, wanting = (len(codec.encode_requests([each])) for each in (replace(request, routing_start=0), request))
    assert plain < wanting
    with pytest.raises(CodecError, match="experts from token 4 of 3"):
        codec.decode_requests(codec.encode_requests([replace(request, routing_start=4)]))
