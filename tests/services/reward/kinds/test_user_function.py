import time

import pytest

from offbeat.services.reward.errors import Failure, RewardError
from tests.services.reward.samples import score

MODULE = "tests.services.reward.functions"


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [("length", {"scale": 0.5}, 2.0), ("waiting_length", {}, 4.0), ("is_long", {}, 1.0)],
)
def test_plain_and_async_functions(function: str, args: dict[str, float], expected: float):
    assert score("function", "abcd", path=f"{MODULE}:{function}", args=args) == expected


def test_a_function_that_hangs_is_left_behind():
    began = time.monotonic()
    with pytest.raises(RewardError) as raised:
        score("function", "", path=f"{MODULE}:hang", timeout_s=0.2)
    assert raised.value.failure is Failure.TIMEOUT
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("function", "response", "message"),
    [
        ("fail", "x", "raised KeyError"),
        ("stop", "x", "SystemExit"),
        ("answer", "nan", "the score is nan"),
        ("answer", "none", "expected a number, got None"),
        ("answer", "text", "expected a number, got '1.0'"),
        ("answer", "list", "expected a number"),
        ("length", "x", "unexpected keyword"),
    ],
)
def test_a_function_that_gives_no_number_fails(function: str, response: str, message: str):
    args = {"bad": 1.0} if function == "length" else {}
    with pytest.raises((RewardError, RuntimeError), match=message):
        score("function", response, path=f"{MODULE}:{function}", args=args)


@pytest.mark.parametrize("path", [f"{MODULE}:missing", "no.such.module:f", f"{MODULE}:NUMBER"])
def test_a_path_that_is_no_function_is_refused(path: str):
    with pytest.raises(ValueError, match=r"^reward 'r': "):
        score("function", "", path=path)
