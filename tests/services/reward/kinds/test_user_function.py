import time
from pathlib import Path

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
    ],
)
def test_a_function_that_gives_no_number_fails(function: str, response: str, message: str):
    with pytest.raises((RewardError, RuntimeError), match=message):
        score("function", response, path=f"{MODULE}:{function}")


@pytest.mark.parametrize("path", [f"{MODULE}:missing", "no.such.module:f", f"{MODULE}:NUMBER"])
def test_a_path_that_is_no_function_is_refused(path: str):
    with pytest.raises(ValueError, match=r"^reward 'r': "):
        score("function", "", path=path)


@pytest.mark.parametrize(
    ("source", "cause"), [("score = (", "SyntaxError"), ("score = missing", "NameError: name 'missing' is not defined")]
)
def test_a_module_that_fails_is_refused(source: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "broken_rewards.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=rf"^reward 'r': broken_rewards:score can't be imported: {cause}"):
        score("function", "", path="broken_rewards:score")


@pytest.mark.parametrize(
    ("function", "args", "says"),
    [
        ("length", {"typo": 2.0}, "unexpected keyword argument 'typo'"),
        ("waiting_length", {"scale": 2.0}, "unexpected keyword argument 'scale'"),
        ("length", {"sample": 2.0}, "multiple values for argument 'sample'"),
    ],
)
def test_args_that_the_function_does_not_take_are_refused(function: str, args: dict[str, float], says: str):
    with pytest.raises(ValueError, match=rf"^reward 'r': .*`args`: .*{says}"):
        score("function", "", path=f"{MODULE}:{function}", args=args)
