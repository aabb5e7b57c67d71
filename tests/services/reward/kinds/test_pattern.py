import time

import pytest
from pydantic import ValidationError

from offbeat.services.reward.errors import Failure, RewardError
from tests.services.reward.samples import config_of, score

FORMAT = r"<think>.*?</think>\s*<answer>.*?</answer>\s*"


def test_full_and_partial_matches_over_lines():
    text = "<think>a\nb</think>\n<answer>c</answer>\n"
    assert score("regex", text, pattern=FORMAT, match="full") == 1.0
    assert score("regex", text + "more", pattern=FORMAT, match="full") == 0.0
    assert score("regex", text + "more", pattern=FORMAT) == 1.0


def test_thoughts_can_be_left_out():
    assert score("regex", "<think>sorry</think> yes", pattern="sorry", text="final") == 0.0
    assert score("regex", "<think>sorry</think> yes", pattern="sorry") == 1.0


def test_endless_backtracking_is_a_failure_and_no_zero():
    began = time.monotonic()
    with pytest.raises(RewardError) as raised:
        score("regex", "a" * 100 + "b", pattern=r"(a|aa)+$", timeout_s=0.2)
    assert raised.value.failure is Failure.TIMEOUT
    assert time.monotonic() - began < 20


def test_a_pattern_that_is_none_is_refused():
    with pytest.raises(ValidationError, match="no regular expression"):
        config_of("regex", pattern="(")
