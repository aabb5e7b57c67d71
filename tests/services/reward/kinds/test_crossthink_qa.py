import asyncio

import pytest

from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.factory import build_function
from offbeat.services.reward.sample import RewardSample
from tests.services.reward.samples import config_of, score, score_once

GOOD = "<think>hm</think> <answer>The Moon.</answer>"
UNFORMATTED = r"It is \boxed{moon}"


@pytest.mark.parametrize(
    ("mode", "in_format", "outside"), [("loose", 1.0, 1.0), ("soft", 1.0, 0.5), ("strict", 1.0, 0.0)]
)
def test_modes_differ_in_correct_answers_outside_of_the_format(mode: str, in_format: float, outside: float):
    assert score("crossthink_qa", GOOD, "moon", mode=mode) == in_format
    assert score("crossthink_qa", UNFORMATTED, "moon", mode=mode) == outside
    assert score("crossthink_qa", GOOD, "sun", mode=mode) == 0.0


@pytest.mark.parametrize(
    "response",
    [
        r"<think>a</think><think>b</think> \boxed{A}",
        r"<think></think> \boxed{A}",
        r"<think>a</think> \boxed{B} \boxed{A}",
        "<think>a</think> <answer>B</answer><answer>A</answer>",
        r"said <think>a</think> \boxed{A}",
        r"</think>\boxed{A}",
    ],
)
def test_a_broken_format_is_none(response: str):
    assert score("crossthink_qa", response, "A", mode="strict") == 0.0
    assert score("crossthink_qa", response, "A", mode="loose") == 1.0


@pytest.mark.parametrize("response", ["", "<answer>", "</answer><answer>A", r"\boxed{", "A", "<think>" * 10_000])
def test_malformed_responses_score_zero(response: str):
    assert score("crossthink_qa", response, "A") == 0.0


def test_one_of_several_truths_suffices():
    assert score("crossthink_qa", UNFORMATTED, ["luna", "Moon"]) == 1.0


@pytest.mark.parametrize(("truth", "answer"), [(5.0, "5"), (5.0, "5.0"), (1e-05, "0.00001"), ([7.0, "x"], "7")])
def test_a_number_of_a_float_column_is_right_in_its_usual_form(truth: object, answer: str):
    assert score("crossthink_qa", f"<answer>{answer}</answer>", truth) == 1.0
    assert score("crossthink_qa", f"<answer>{answer}1</answer>", truth) == 0.0


def test_a_letter_is_compared_as_one():
    assert score("crossthink_qa", "<answer>(B) Paris</answer>", "b") == 1.0
    assert score("crossthink_qa", "<answer>A or B</answer>", "b") == 0.0


@pytest.mark.parametrize("gold", ["b", "(B)", "B.", r"\text{B}", "B) Paris", "(B) Paris"])
@pytest.mark.parametrize(("answer", "expected"), [("B", 1.0), ("b. Paris", 1.0), ("A", 0.0), ("Paris", 0.0)])
def test_choices_are_compared_by_their_letters(gold: str, answer: str, expected: float):
    assert score("crossthink_qa", f"<answer>{answer}</answer>", gold) == expected


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("E. coli", "E coli", "E. faecalis"),
        ("E. coli", "e. coli", "E"),
        ("J. K. Rowling", "J K Rowling", "J. R. R. Tolkien"),
        ("T. rex", "T rex", "T. Rix"),
        ("n: 5", "n: 5", "n: 7"),
    ],
)
def test_a_text_that_begins_with_an_initial_is_no_choice(gold: str, right: str, wrong: str):
    assert score("crossthink_qa", f"<answer>{right}</answer>", gold) == 1.0
    assert score("crossthink_qa", f"<answer>{wrong}</answer>", gold) == 0.0


LINES = "Which?\nA. Rome\nB. Paris\nC. E. coli\nD. London\nAnswer by a letter."
INLINE = "A) Rome (B) Paris C: E. coli D. London"
OF_FIVE = "E. coli is what?\nA. one\nB. E. coli\nC. three\nD. four\nE. five"
EARLIER = "A. Paris\nB. Rome\n\nNow: A. Rome\nB. Paris"


@pytest.mark.parametrize(
    ("prompt", "gold", "answer", "expected"),
    [
        (LINES, "B. Paris", "B", 1.0),
        (LINES, "B: Paris", "(B)", 1.0),
        (LINES, "B. Paris", "A", 0.0),
        (LINES, "D. London", "D) London", 1.0),
        (INLINE, "B. Paris", "B", 1.0),
        (LINES + "\nA: Let's think step by step.", "B. Paris", "B", 1.0),
        (LINES + " Give a. short answer.", "B. Paris", "A", 0.0),
        (EARLIER, "B. Paris", "B", 1.0),
        (EARLIER, "B. Rome", "B", 0.0),
        (LINES, "E. coli", "E", 0.0),
        (LINES, "E. coli", "E coli", 1.0),
        (INLINE, "E. coli", "E", 0.0),
        (OF_FIVE, "E. coli", "E", 0.0),
        (OF_FIVE, "E. coli", "e. coli", 1.0),
        (OF_FIVE, "E. five", "E", 1.0),
        ("", "B. Paris", "B", 0.0),
    ],
)
def test_a_text_after_a_letter_is_the_choice_that_the_prompt_offers(
    prompt: str, gold: str, answer: str, expected: float
):
    a_sample = RewardSample([{"role": "user", "content": prompt}], f"<answer>{answer}</answer>", ground_truth=gold)
    function = build_function(config_of("crossthink_qa"))
    assert asyncio.run(score_once(function, a_sample)) == expected


def test_a_row_without_truth_fails():
    with pytest.raises(RewardError) as raised:
        score("crossthink_qa", GOOD)
    assert raised.value.failure is Failure.BAD_ROW
