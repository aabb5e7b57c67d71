import json
import time
from typing import Any

import pytest

from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.kinds.ifeval_constraints import (
    CONSTRAINTS,
    check_constraint,
    count_sentences,
    detect_language,
)
from tests.services.reward.samples import score

MET: dict[str, tuple[dict[str, Any], str, str]] = {
    "keywords:existence": ({"keywords": ["C++", "moon"]}, "The MOON likes c++.", "The moon likes C."),
    "keywords:frequency": ({"keyword": "ox", "frequency": 2, "relation": "less than"}, "One ox.", "An ox, an ox."),
    "keywords:forbidden_words": ({"forbidden_words": ["cat"]}, "A category.", "A Cat."),
    "keywords:letter_frequency": (
        {"letter": "Q", "let_frequency": 2, "let_relation": "at least"},
        "Quick quiz",
        "Quick",
    ),
    "language:response_language": ({"language": "de"}, "Guten Morgen, wie geht es dir heute?", "Good morning to you."),
    "length_constraints:number_sentences": ({"num_sentences": 2, "relation": "at least"}, "Yes. No!", "Dr. No is 3.5."),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "a\n***\nb", "a\n***\n\n***\nb"),
    "length_constraints:number_words": ({"num_words": 3, "relation": "at least"}, "one two three", "one two"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "But"},
        "a b\n\n'but, c",
        "but\n\nc",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[a] and [b]", "[[a] and b]"),
    "detectable_content:postscript": ({"postscript_marker": "P.P.S"}, "Bye.\nP. P.S. more", "Bye.\nP.S. more"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n  - b", "* a\n** b"),
    "detectable_format:constrained_response": ({}, "My answer is maybe.", "Maybe."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*a* **b**", "*a* **"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2\nb",
        "Section one, Section 2",
    ),
    "detectable_format:json_format": ({}, '```json\n{"a": 1}\n```', "{a: 1}"),
    "detectable_format:title": ({}, "<<Ode>>\nText", "<< >>"),
    "combination:two_responses": ({}, "a******b", "a******a"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say hi."}, "say hi. Hi", "Hi. Say hi."),
    "startend:end_checker": ({"end_phrase": "The end."}, 'It is. "The end."', "The end. Or not"),
    "startend:quotation": ({}, '"So"', '"'),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        "VERY WELL-DONE",
        "VERY well",
    ),
    "change_case:english_capital": ({}, "THIS IS AN ENGLISH SENTENCE ABOUT THE WEATHER", "This is English"),
    "change_case:english_lowercase": (
        {},
        "this is an english sentence about the weather",
        "das ist ein deutscher satz",
    ),
    "punctuation:no_comma": ({}, "a and b", "a, b"),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_every_constraint_distinguishes_met_from_broken(name: str):
    args, met, broken = MET[name]
    assert check_constraint(name, met, args), met
    assert not check_constraint(name, broken, args), broken


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_an_empty_response_meets_no_constraint(name: str):
    assert not check_constraint(name, " \n", MET[name][0])


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "*" * 200_000,
        " \n" * 100_000 + "x",
        "<<" * 100_000,
        "." * 200_000,
        "." * 200_000 + "x",
        "***" * 70_000,
    ],
)
def test_no_constraint_takes_more_than_linear_time(text: str):
    began = time.monotonic()
    for name, (args, _, _) in MET.items():
        check_constraint(name, text, args)
    assert time.monotonic() - began < 10


def test_sentences_end_at_marks_and_not_at_abbreviations():
    assert count_sentences("Dr. Smith paid 3.5 dollars, e.g. to J. Doe. He left") == 2
    assert count_sentences('He asked "Why?" Nobody knew... Then silence!') == 3
    assert count_sentences("so am I. Yes.") == 2
    assert count_sentences("") == 0


def test_a_text_without_language_is_in_none():
    assert detect_language("12345 !!!") == ""
    assert not check_constraint("language:response_language", "12345", {"language": "fr"})
    texts = ["Das ist es.", "Voilà, c'est tout."]
    assert [detect_language(text) for text in texts * 3] == ["de", "fr"] * 3


ROW = {
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{"num_words": None}, {"num_words": 2, "relation": "less than"}],
}


def test_the_share_of_constraints_or_all_of_them():
    assert score("ifeval", "one two", row=ROW) == 0.5
    assert score("ifeval", "one two", row=ROW, reward="all") == 0.0
    assert score("ifeval", "one", row=ROW, reward="all") == 1.0
    assert score("ifeval", "<think>well, long thoughts</think> one", row=ROW) == 1.0


def test_constraints_may_be_json_in_the_truth():
    assert score("ifeval", "one", json.dumps(ROW)) == 1.0


def test_loose_accuracy_leaves_out_a_first_line():
    assert score("ifeval", "Sure, here it is:\none", row=ROW) == 0.0
    assert score("ifeval", "Sure, here it is:\none", row=ROW, mode="loose") == 1.0


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"instruction_id_list": [], "kwargs": []},
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": []},
        {"instruction_id_list": ["no:such"], "kwargs": [{}]},
        {"instruction_id_list": ["length_constraints:number_words"], "kwargs": [{}]},
        {
            "instruction_id_list": ["length_constraints:number_words"],
            "kwargs": [{"num_words": "x", "relation": "at least"}],
        },
        {"instruction_id_list": ["length_constraints:number_words"], "kwargs": [{"num_words": 3, "relation": "about"}]},
        {"instruction_id_list": ["startend:end_checker"], "kwargs": [{"end_phrase": " "}]},
    ],
)
def test_rows_that_are_no_constraints_fail(row: dict[str, Any]):
    with pytest.raises(RewardError) as raised:
        score("ifeval", "text", row=row)
    assert raised.value.failure is Failure.BAD_ROW
