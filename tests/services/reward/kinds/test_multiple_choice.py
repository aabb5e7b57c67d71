import pytest

from offbeat.services.reward.errors import Failure, RewardError
from tests.services.reward.samples import score


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        (r"\boxed{B}", "B", 1.0),
        (r"\boxed{\text{(b)}}", "B", 1.0),
        (r"\boxed{B. because A is wrong}", "(B)", 1.0),
        (r"\boxed{A} no, \boxed{B}", "B", 1.0),
        (r"\boxed{B}", 1, 1.0),
        (r"\boxed{A or B}", "A", 0.0),
        (r"\boxed{AB}", "A", 0.0),
        (r"\boxed{Apples}", "A", 0.0),
        (r"<think>\boxed{B}</think>", "B", 0.0),
        (r"\boxed{}", "B", 0.0),
        ("B", "B", 0.0),
        (r"\boxed{B" + " " * 100_000, "B", 0.0),
        (r"\boxed{" + "(" * 100_000 + "B}", "B", 0.0),
    ],
)
def test_one_letter_counts(response: str, truth: object, expected: float):
    assert score("multiple_choice", response, truth) == expected


def test_a_pattern_finds_letters_without_a_box():
    settings = {"answer_pattern": r"answer is \(?([A-D])\b"}
    assert score("multiple_choice", "The answer is (C).", "C", **settings) == 1.0
    assert score("multiple_choice", "The answer is Carbon.", "C", **settings) == 0.0


@pytest.mark.parametrize("truth", [None, "AB", "E", 4, "", ["A"]])
def test_a_truth_that_is_no_choice_fails_the_row(truth: object):
    with pytest.raises(RewardError) as raised:
        score("multiple_choice", r"\boxed{A}", truth, num_choices=4)
    assert raised.value.failure is Failure.BAD_ROW
