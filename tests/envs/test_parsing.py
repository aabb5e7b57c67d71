import random
import re
import time
from threading import Thread

import pytest

from offbeat.envs import parsing
from offbeat.envs.dataset.code import FENCED
from offbeat.envs.dataset.env import last_group
from offbeat.envs.parsing import (
    ANSWER_PATTERN,
    THINK_ANSWER_PATTERN,
    WHOLE_PATTERN,
    ActionParser,
    compile_pattern,
)

LOOKUP = {"Left": 0, "Down": 1}


def test_lookup_of_one_group_ignores_case():
    parse = ActionParser(ANSWER_PATTERN, LOOKUP)
    assert parse("I go <answer> dOWN\n</answer>") == (1, "dOWN", "")


def test_two_groups_are_thought_and_action_over_several_lines():
    parsed = ActionParser(THINK_ANSWER_PATTERN, LOOKUP)("<think>a\nb</think>\n <answer>Left</answer>")
    assert parsed == (0, "Left", "a\nb")


def test_special_tokens_are_stripped_before_and_inside():
    parse = ActionParser(WHOLE_PATTERN, LOOKUP, special_tokens=("<|im_end|>",))
    assert parse("Down<|im_end|>").action == 1


@pytest.mark.parametrize("text", ["", "<answer>Up</answer>", "Left", "<answer></answer>"])
def test_an_unknown_action_is_none(text: str):
    assert ActionParser(ANSWER_PATTERN, LOOKUP)(text).action is None


def test_the_whole_answer_must_be_the_action():
    assert ActionParser(WHOLE_PATTERN, LOOKUP)("Down Left").action is None


@pytest.mark.parametrize(
    ("pattern", "why"), [("(", "no regular expression"), ("abc", "0 groups"), ("(a)(b)(c)", "3 groups")]
)
def test_an_invalid_pattern_is_refused(pattern: str, why: str):
    with pytest.raises(ValueError, match=why):
        ActionParser(pattern, LOOKUP)


REPEATED = "<think></think><answer>" * 1500
"""A second of CPU time is not enough."""


def test_an_answer_on_which_a_pattern_backtracks_has_no_match(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(parsing, "MAX_MATCH_S", 0.2)
    began = time.thread_time()
    assert last_group(THINK_ANSWER_PATTERN, REPEATED) is None
    assert ActionParser(THINK_ANSWER_PATTERN, LOOKUP)(REPEATED).action is None
    assert time.thread_time() - began < 2
    assert "backtracks for over 0.2 s on an answer of 34500 characters" in caplog.text


def test_other_threads_run_while_a_pattern_backtracks():
    pattern = compile_pattern(THINK_ANSWER_PATTERN)
    matching = Thread(target=lambda: pattern.search(REPEATED))
    matching.start()
    num_turns = 0
    while matching.is_alive():
        time.sleep(0.01)
        num_turns += 1
    assert num_turns > 5


@pytest.mark.parametrize(
    "pattern", [ANSWER_PATTERN, THINK_ANSWER_PATTERN, WHOLE_PATTERN, FENCED, r"(\d*)", r"(a)?|(b*)"]
)
def test_a_pattern_matches_as_by_re(pattern: str):
    drawn = random.Random(0)
    parts = ["<think>", "</think>", "<answer>", "</answer>", "a", "b", "12", " ", "\n", "```", "```python\n", "```js\n"]
    expected, compiled = re.compile(pattern, re.DOTALL), compile_pattern(pattern)
    for _ in range(1000):
        text = "".join(drawn.choices(parts, k=drawn.randrange(12)))
        found = [(match.span(), match.groups()) for match in compiled.find_all(text)]
        assert found == [(match.span(), match.groups()) for match in expected.finditer(text)]
        first = compiled.search(text)
        assert (first and first.span()) == ((match := expected.search(text)) and match.span())
