import datetime

import numpy as np
import pytest

from offbeat.services.reward.errors import RewardError
from offbeat.services.reward.sample import RewardSample, decode_sample, encode_sample, final_text, text_of


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
