import datetime
from typing import Any

import numpy as np
import pytest

from offbeat.services.reward.errors import RewardError
from offbeat.services.reward.sample import (
    RewardSample,
    as_member,
    decode_member,
    decode_sample,
    encode_sample,
    final_text,
    text_of,
)
from tests.copying import replace


def test_a_sample_survives_its_encoding():
    row = {"n": 1, "x": [0.5, None], "deep": {"a": "ü"}, "blob": b"\0"}
    sample = RewardSample([{"role": "user", "content": "q"}], "r\ud7ff", 3, {"a": 1}, "math", row)
    assert decode_sample(encode_sample(sample)) == sample


def test_what_tables_hold_can_be_encoded():
    row = {"array": np.array([1, 2]), "number": np.float32(0.5), "day": datetime.datetime(2024, 1, 2)}
    decoded = decode_sample(encode_sample(RewardSample([], "r", row=row)))
    assert decoded.row["array"] == [1, 2]
    assert decoded.row["number"] == 0.5
    with pytest.raises(RewardError, match="bad_row: a object in the row"):
        encode_sample(RewardSample([], "r", row={"x": object()}))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (10**25, "1" + 25 * "0"),
        (2**64 - 1, 2**64 - 1),
        ([-(2**63), -(2**63) - 1], [-(2**63), str(-(2**63) - 1)]),
        ({1: {2.5: "a"}, "b": b"\0"}, {"1": {"2.5": "a"}, "b": b"\0"}),
        ({1: np.array([1, 2])}, {"1": [1, 2]}),
    ],
)
def test_what_msgpack_can_not_hold_becomes_text(value: Any, expected: Any):
    sample = as_member(RewardSample([], "r", ground_truth=value, row={"x": value}), {"a": 1.0}, 0.5)
    decoded = decode_member(encode_sample(sample))
    assert decoded == as_member(RewardSample([], "r", ground_truth=expected, row={"x": expected}), {"a": 1.0}, 0.5)
    assert encode_sample(sample) == encode_sample(replace(sample))


def test_a_key_without_a_text_is_refused():
    with pytest.raises(RewardError, match="bad_row: Only dicts with str-like or number-like keys"):
        encode_sample(RewardSample([], "r", row={"x": {(1, 2): 3}}))


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (" a ", "a"),
        ("<think>t</think> a", "a"),
        ("t</think>a", "a"),
        ("<think>t", ""),
        ("<think>a</think>b</think>c", "c"),
        ("", ""),
    ],
)
def test_thoughts_are_no_answer(response: str, expected: str):
    assert final_text(response) == expected


def test_the_text_of_parts():
    assert text_of([{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]) == "ab"
    assert text_of("a") == "a"
    assert text_of(None) == ""
