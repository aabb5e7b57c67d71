"""The 25 constraints of IFEval (arXiv:2311.07911), as functions of the response and the row's arguments.

They decide as the published checkers, except that keywords are texts instead of regular expressions, sentences are
split by a rule, and a text without recognizable language is in none. Time is linear in the response.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from offbeat.envs.optional_imports import require

Args = Mapping[str, Any]

TITLES = ("mr", "mrs", "ms", "dr", "prof", "rev", "st", "sr", "jr")
ABBREVIATIONS = frozenset(
    (*TITLES, "vs", "etc", "fig", "no", "approx", "inc", "ltd", "e.g", "i.e", "a.m", "p.m", "u.s")
)
CONSTRAINED_RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
MAX_DETECTED_CHARS = 10_000
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"')\]”’]*+(?=\s|$)")
_WORD = re.compile(r"\w+")
_WORD_WITH_MARKS = re.compile(r"[\w'’-]+")


class ConstraintError(ValueError):
    """Unknown constraint, or arguments that it can't use."""


def check_constraint(name: str, response: str, args: Args) -> bool:
    """Return whether a response meets a constraint; raises ConstraintError."""
    constraint = CONSTRAINTS.get(name)
    if constraint is None:
        raise ConstraintError(f"there is no constraint {name!r}; there is {', '.join(CONSTRAINTS)}")
    try:
        return bool(response.strip()) and constraint(response, args)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConstraintError(f"{name}: the arguments {dict(args)} lack or mistake {error}") from error


def count_sentences(text: str) -> int:
    start = count = 0
    for match in _SENTENCE_END.finditer(text):
        words = text[max(start, match.start() - 20) : match.start()].split()
        last = words[-1].lower().lstrip("(\"'") if words else ""
        if match[0] == "." and (last in ABBREVIATIONS or (len(last) == 1 and last.isalpha() and last != "i")):
            continue
        count += bool(text[start : match.end()].strip())
        start = match.end()
    return count + bool(text[start:].strip())


def _compare(count: int, relation: str, limit: int) -> bool:
    match relation:
        case "less than":
            return count < limit
        case "at least":
            return count >= limit
        case _:
            raise ConstraintError(f"the relation {relation!r} is neither 'less than' nor 'at least'")


def _has_keywords(text: str, args: Args) -> bool:
    lowered = text.lower()
    return all(str(keyword).lower() in lowered for keyword in args["keywords"])


def _keyword_frequency(text: str, args: Args) -> bool:
    keyword = args["keyword"].strip().lower()
    if not keyword:
        raise ConstraintError("the keyword is empty")
    return _compare(text.lower().count(keyword), args["relation"], args["frequency"])


def _has_no_forbidden_words(text: str, args: Args) -> bool:
    words = "|".join(re.escape(str(word)) for word in args["forbidden_words"])
    return not re.search(rf"\b(?:{words})\b", text, re.IGNORECASE) if words else True


def _letter_frequency(text: str, args: Args) -> bool:
    letter = args["letter"].strip().lower()
    if len(letter) != 1:
        raise ConstraintError(f"{letter!r} is no letter")
    return _compare(text.lower().count(letter), args["let_relation"], args["let_frequency"])


def _number_of_sentences(text: str, args: Args) -> bool:
    return _compare(count_sentences(text), args["relation"], args["num_sentences"])


def _number_of_words(text: str, args: Args) -> bool:
    return _compare(len(_WORD.findall(text)), args["relation"], args["num_words"])


def _number_of_paragraphs(text: str, args: Args) -> bool:
    paragraphs = [part.strip() for part in text.split("***")]
    inner = paragraphs[1:-1]
    return all(inner) and sum(map(bool, paragraphs)) == args["num_paragraphs"]


def _first_word_of_paragraph(text: str, args: Args) -> bool:
    paragraphs = text.split("\n\n")
    nth, count = args["nth_paragraph"], sum(1 for part in paragraphs if part.strip())
    if not 1 <= nth <= count or not (paragraph := paragraphs[nth - 1].strip()):
        return False
    word = re.split(r"[.,?!'\"]", paragraph.split()[0].lstrip("'\""), maxsplit=1)[0].lower()
    return count == args["num_paragraphs"] and word == args["first_word"].lower()


def _number_of_placeholders(text: str, args: Args) -> bool:
    return sum(_count_bracketed(line) for line in text.splitlines()) >= args["num_placeholders"]


def _count_bracketed(line: str) -> int:
    count, position = 0, 0
    while (start := line.find("[", position)) >= 0 and (end := line.find("]", start)) >= 0:
        count, position = count + 1, end + 1
    return count


def _has_postscript(text: str, args: Args) -> bool:
    marker = args["postscript_marker"].strip()
    patterns: dict[str, str] = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    pattern = patterns.get(marker) or re.escape(marker.lower())
    return re.search(pattern, text.lower()) is not None


def _number_of_bullets(text: str, args: Args) -> bool:
    lines = [line.lstrip() for line in text.splitlines()]
    bullets = [line for line in lines if line.startswith("-") or (line.startswith("*") and line[1:2] not in ("", "*"))]
    return len(bullets) == args["num_bullets"]


def _is_constrained_response(text: str, _: Args) -> bool:
    return any(option in text for option in CONSTRAINED_RESPONSES)


def _number_of_highlights(text: str, args: Args) -> bool:
    single = re.findall(r"\*[^\n*]*\*", text)
    double = re.findall(r"\*\*[^\n*]*\*\*", text)
    return sum(1 for each in (*single, *double) if each.strip("*").strip()) >= args["num_highlights"]


def _number_of_sections(text: str, args: Args) -> bool:
    splitter = re.escape(args["section_spliter"].strip())
    return len(re.findall(rf"{splitter}\s?\d", text)) >= args["num_sections"]


def _is_json(text: str, _: Args) -> bool:
    content = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        content = content.removeprefix(fence)
    try:
        json.loads(content.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _has_title(text: str, _: Args) -> bool:
    for line in text.splitlines():
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end and line[start:end].strip("<> "):
            return True
    return False


def _is_two_responses(text: str, _: Args) -> bool:
    parts = [part.strip() for part in text.split("******")]
    responses = [part for part in parts if part]
    return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


def _repeats_prompt(text: str, args: Args) -> bool:
    return text.strip().lower().startswith(_not_empty(args, "prompt_to_repeat"))


def _ends_with_phrase(text: str, args: Args) -> bool:
    return text.strip().strip('"').lower().endswith(_not_empty(args, "end_phrase"))


def _not_empty(args: Args, key: str) -> str:
    value = args[key].strip().lower()
    if not value:
        raise ConstraintError(f"{key} is empty")
    return value


def _is_quoted(text: str, _: Args) -> bool:
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == stripped[-1] == '"'


def _capital_word_frequency(text: str, args: Args) -> bool:
    count = sum(word.isupper() for word in _WORD_WITH_MARKS.findall(text))
    return _compare(count, args["capital_relation"], args["capital_frequency"])


def _is_english_capital(text: str, _: Args) -> bool:
    return text.isupper() and detect_language(text) == "en"


def _is_english_lowercase(text: str, _: Args) -> bool:
    return text.islower() and detect_language(text) == "en"


def _has_no_comma(text: str, _: Args) -> bool:
    return "," not in text


def _is_in_language(text: str, args: Args) -> bool:
    return detect_language(text).partition("-")[0] == args["language"].partition("-")[0].lower()


def detect_language(text: str) -> str:
    """Return the ISO 639-1 code, or an empty text; deterministic. Raises ValueError without langdetect."""
    langdetect = require("langdetect", "data")
    detector = _detector_factory().create()
    detector.append(text[:MAX_DETECTED_CHARS])
    try:
        return str(detector.detect())
    except langdetect.LangDetectException:
        return ""


@cache
def _detector_factory() -> Any:
    """Return langdetect's profiles, seeded, as detection samples."""
    module = require("langdetect.detector_factory", "data")
    factory = module.DetectorFactory()
    factory.load_profile(module.PROFILES_DIRECTORY)
    factory.set_seed(0)
    return factory


CONSTRAINTS: Mapping[str, Callable[[str, Args], bool]] = {
    "keywords:existence": _has_keywords,
    "keywords:frequency": _keyword_frequency,
    "keywords:forbidden_words": _has_no_forbidden_words,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _is_in_language,
    "length_constraints:number_sentences": _number_of_sentences,
    "length_constraints:number_paragraphs": _number_of_paragraphs,
    "length_constraints:number_words": _number_of_words,
    "length_constraints:nth_paragraph_first_word": _first_word_of_paragraph,
    "detectable_content:number_placeholders": _number_of_placeholders,
    "detectable_content:postscript": _has_postscript,
    "detectable_format:number_bullet_lists": _number_of_bullets,
    "detectable_format:constrained_response": _is_constrained_response,
    "detectable_format:number_highlighted_sections": _number_of_highlights,
    "detectable_format:multiple_sections": _number_of_sections,
    "detectable_format:json_format": _is_json,
    "detectable_format:title": _has_title,
    "combination:two_responses": _is_two_responses,
    "combination:repeat_prompt": _repeats_prompt,
    "startend:end_checker": _ends_with_phrase,
    "startend:quotation": _is_quoted,
    "change_case:capital_word_frequency": _capital_word_frequency,
    "change_case:english_capital": _is_english_capital,
    "change_case:english_lowercase": _is_english_lowercase,
    "punctuation:no_comma": _has_no_comma,
}
