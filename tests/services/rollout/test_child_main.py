from typing import Any

import msgpack
import pytest

from offbeat.services.rollout.child_main import answer


@pytest.mark.parametrize("result", [10**30, "half of a pair: \ud83d", object()])
def test_a_result_that_can_not_be_packed_is_an_error_of_the_command(result: Any):
    ok, (message, trace) = msgpack.unpackb(answer({"step": lambda: result}, ["step"]))
    assert not ok
    assert message.startswith(("OverflowError", "UnicodeEncodeError", "TypeError"))
    assert "packb" in trace


def test_an_error_may_have_any_text():
    def step() -> None:
        raise ValueError("half of a pair: \ud83d")

    ok, (message, _) = msgpack.unpackb(answer({"step": step}, ["step"]))
    assert (ok, message) == (False, r"ValueError: half of a pair: \ud83d")
