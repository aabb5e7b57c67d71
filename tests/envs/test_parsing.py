import pytest

from offbeat.envs.parsing import (
    ANSWER_PATTERN,
    THINK_ANSWER_PATTERN,
    WHOLE_PATTERN,
    ActionParser,
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
