"""Messages on the wire are the SDK's, whose package only the tests need."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinker import types
from tinker.proto import tinker_public_pb2 as sdk
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from offbeat.services.errors import CodecError
from offbeat.services.generation.engine import MostLikely
from offbeat.services.tinker.wire import (
    CLASSES,
    MAX_SPARSE,
    MESSAGES,
    SampleAnswer,
    SampledSequence,
    decode_forward_backward,
    decode_sample_response,
    encode_forward_backward_output,
    encode_sample_response,
)

RENAMED = {
    "EncodedText": "EncodedTextChunk",
    "ConfigValue": "LossConfigValue",
}
OWN = {"token_versions"}


def request(**inputs: Any) -> bytes:
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)
    message = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(
            data=[datum, datum], loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.5, "mode": "x"}
        ),
        model_id="m",
        seq_id=7,
    )
    return forward_backward_request_to_proto(message).SerializeToString()


@pytest.mark.parametrize("name", [each for each in MESSAGES if not each.endswith("Entry") and each != "Other"])
def test_field_numbers_are_the_sdks(name: str) -> None:
    ours = CLASSES[name].DESCRIPTOR.fields_by_name
    theirs = getattr(sdk, RENAMED.get(name, name)).DESCRIPTOR.fields_by_name
    for field in set(ours.keys()) - OWN:
        assert ours[field].number == theirs[field].number, field
        assert ours[field].is_repeated == theirs[field].is_repeated, field


def test_a_request_of_the_sdk_is_read() -> None:
    body = request(target_tokens=np.array([2, 3, 4]), logprobs=np.array([-1, -2, -3], np.float32))
    decoded = decode_forward_backward(body)
    assert (decoded.model_id, decoded.seq_id, decoded.loss_fn, decoded.forward_only) == ("m", 7, "ppo", False)
    assert decoded.loss_config == {"clip_low_threshold": 0.5, "mode": "x"}
    data = decoded.data()
    assert len(data) == decoded.num_data == 2
    assert data[1].tokens.tolist() == [1, 2, 3]
    assert data[1].inputs["target_tokens"].tolist() == [2, 3, 4]
    assert data[1].inputs["logprobs"].dtype == np.float32


def test_sparse_inputs_are_read_dense() -> None:
    targets = torch.zeros(3, 50, dtype=torch.int64)
    targets[0, 4], targets[2, 49] = 9, 8
    data = decode_forward_backward(request(target_tokens=targets, weights=torch.zeros(3, 50))).data()
    np.testing.assert_array_equal(data[0].inputs["target_tokens"], targets.numpy())
    assert data[0].inputs["weights"].shape == (3, 50)


def test_sparse_inputs_of_a_request_have_a_limit() -> None:
    """Each tensor has a few bytes on the wire, and a quarter of the elements or a bit more."""
    targets = torch.zeros(3, MAX_SPARSE // 12 + 1, dtype=torch.int64)
    targets[0, 4] = 9
    decode_forward_backward(request(target_tokens=targets)).data()
    large = decode_forward_backward(request(target_tokens=targets, weights=torch.zeros(3, targets.shape[1])))
    with pytest.raises(CodecError, match=r"^data\[1\]\.\w+: .* or targets as \[N, K\]"):
        large.data()
    assert len(large.data(is_repeated=True)) == 2


def test_dense_inputs_are_bounded_by_their_body_alone() -> None:
    weights = np.ones((2, MAX_SPARSE // 4 + 1), np.float32)
    data = decode_forward_backward(request(weights=weights, logprobs=weights)).data()
    assert sum(array.size for datum in data for array in datum.inputs.values()) > MAX_SPARSE


def test_an_output_is_read_by_the_sdk() -> None:
    """Also of several shapes, in the order of the data."""
    arrays = [np.array([-1.0, -2.0]), np.array([[-3.0, -4.0]]), np.array([-5.0])]
    output = deserialize_forward_backward_output(
        encode_forward_backward_output({"logprobs": arrays}, {"loss:sum": 2.5})
    )
    assert output.metrics == {"loss:sum": 2.5}
    assert [each["logprobs"].to_numpy().tolist() for each in output.loss_fn_outputs] == [
        each.tolist() for each in arrays
    ]


def test_samples_are_read_by_the_sdk_which_skips_the_versions() -> None:
    top = [MostLikely([5, 9], [-0.5, -2.0]), MostLikely([7], [-0.25])]
    sequences = [SampledSequence([5, 6], [-0.5, -1.0], [3, 4], "stop", top), SampledSequence([], [], [], "length")]
    answer = SampleAnswer(sequences, [-0.5, -1.0], [MostLikely([], []), *top])
    body = encode_sample_response(answer)
    read = deserialize_sample_response(body).sequences
    assert [list(each.tokens) for each in read] == [[5, 6], []]
    assert [each.stop_reason for each in read] == ["stop", "length"]
    assert list(read[0].logprobs or ()) == [-0.5, -1.0]
    assert [each.topk_logprobs for each in read] == [[[(5, -0.5), (9, -2.0)], [(7, -0.25)]], None]
    assert decode_sample_response(body) == answer
    assert decode_sample_response(encode_sample_response(SampleAnswer(sequences))) == SampleAnswer(sequences)


def spoil(change: Any) -> bytes:
    message = sdk.ForwardBackwardRequest()
    message.ParseFromString(request(target_tokens=np.array([2, 3, 4])))
    change(message.data[0])
    return message.SerializeToString()


def set_sparse(datum: Any) -> None:
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.shape[:] = [3, 2]
    tensor.sparse_csr.values = tensor.sparse_csr.col_indices = np.array([9]).tobytes()
    tensor.sparse_csr.crow_indices = np.array([0, 1, 1, 1]).tobytes()


BAD = {
    "bytes": (lambda d: setattr(d.model_input[0].encoded_text, "tokens", b"abc"), "no whole number"),
    "image": (lambda d: setattr(d.model_input[0].image, "data", b"x"), "no text"),
    "dtype": (lambda d: setattr(d.loss_fn_inputs["target_tokens"], "dtype", 4), "neither float32"),
    "shape": (lambda d: d.loss_fn_inputs["target_tokens"].shape.__setitem__(slice(None), [2]), "do not have shape"),
    "huge": (lambda d: d.loss_fn_inputs["target_tokens"].shape.__setitem__(slice(None), [1 << 40] * 2), "elements"),
    "deep": (lambda d: d.loss_fn_inputs["target_tokens"].shape.__setitem__(slice(None), [1] * 100), "100 dimensions"),
    "empty": (lambda d: d.loss_fn_inputs["target_tokens"].shape.__setitem__(slice(None), [0, 1 << 62]), "elements"),
    "sparse": (set_sparse, "do not fit"),
}


@pytest.mark.parametrize("kind", BAD)
def test_data_that_cannot_be_read_is_refused_with_its_place(kind: str) -> None:
    change, message = BAD[kind]
    with pytest.raises(CodecError, match=rf"data\[0\].*{message}"):
        decode_forward_backward(spoil(change)).data()


@given(st.binary(max_size=200), st.integers(0, 200))
def test_hostile_bytes_are_refused_or_read(noise: bytes, place: int) -> None:
    body = request(target_tokens=np.array([2, 3, 4]))
    for hostile in (noise, body[:place] + noise + body[place:]):
        try:
            decode_forward_backward(hostile).data()
        except CodecError:
            continue
