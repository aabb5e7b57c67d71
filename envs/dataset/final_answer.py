r"""Text rules for math answers: one final, cheap value.

math-verify takes one value of many: of `13=12` the last side, of `12 \approx 13` the first, of several boxes any that
parses. Such texts are refused before it.
"""

import re
from itertools import pairwise

MAX_CHARS = 1000
MAX_DIGITS = 100
"""Digits of one number."""
MAX_DEPTH = 20
"""Nested brackets."""
MAX_SIDES = 5
"""Sides of `x = a = b`."""

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_MATH_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_DOLLAR = re.compile(r"(?<!\\)\$")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:,(?:\\!)?|\{,\}|\\[,!:; ]| )\d{3})+(?!\d)")
_PLAIN_COMMA = re.compile(r"(?<![{\\]),(?!\\!)")
_SPACED_COMMA = re.compile(r"(?<![{\\]),(?:\s|~|\\[ ,;:])")
_OPERATOR_BEFORE = re.compile(r"(?:[\w)}]\s*[-+*/]|\\(?:cdot|times|div))\s*$")
_OPERATOR_AFTER = re.compile(r"\s*(?:[-+*/]|\\(?:cdot|times|div)(?![a-zA-Z]))")
_SPACE = re.compile(r"(?<!\\)\\[ ,;:!]|~")
_SEPARATORS = re.compile(
    r",|;|\\\\|\n|[<>]|\\(?:le|leq|leqslant|ge|geq|geqslant|lt|gt|ne|neq|to|mapsto|iff|implies|pm|mp|mid|cup|cap|lor|land|vee|wedge)"
    r"(?![a-zA-Z])|\\(?:long|Long)?(?:left|right|leftright|Left|Right|Leftright)arrow|(?<![a-zA-Z])(?:or|and|but|not)(?![a-zA-Z])"
)
"""Separators of values or statements."""
_RELATION = re.compile(
    r"=|\\approx(?![a-zA-Z])|\\equiv(?![a-zA-Z])|\\simeq(?![a-zA-Z])|\\cong(?![a-zA-Z])|\\in(?![a-zA-Z])|≈|≡"
)
_BRACKETS = re.compile(r"\\.|[()\[\]{}]", re.DOTALL)
_SCIENTIFIC = re.compile(r"([+-]?(?:1|\d*\.\d+|\d+(?=[eE](?:\d|[+-]\d\d))))[eE]([+-]?\d+)")
"""A number as programs write it, `2.5e-05`; not `2e-1`, which is 2 e - 1."""
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])")
_HIDDEN = re.compile(
    r"\\(?:h|v|x|b)?(?:phantom|cancel|sout|overset|underset|stackrel|tag|label|color|textcolor|footnote|substack|not)(?![a-zA-Z])|(?<!\\)%."
)
"""Commands whose argument is not part of the value."""
_TEXT = re.compile(r"\\(?:text\w*|math(?:rm|it|bf|sf|tt)|mbox|operatorname)\s*\{([^{}]*)\}")
_ADJACENT_NUMBERS = re.compile(r"\d(?:\s|~|\\[ ,;:!]|\\q?quad(?![a-zA-Z]))+\d")
_BASE = re.compile(r"\d\s*_\s*\{?\s*(\w*)")
_NAME = re.compile(r"(?:[a-zA-Z]|\\[a-zA-Z]++|[_^]\d|[_^]\{[^{}]*\}|\([^()]*\)|[|'{}+\-*\s]|\\[ ,;:!|])++")
_EXPONENT = re.compile(r"(?:\^|\*\*)\s*+[({]*+\s*+[+-]?\s*+(\d++)")
_NUMERIC_TOWER = re.compile(r"(?:\^|\*\*)[({\s]*[\d.]+[\s)]*(?:\^|\*\*)")
_FACTORIAL = re.compile(r"(?:\d{5,}|[)}\]!])\s*!")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last outermost `\boxed{...}`, or None; None if a later one isn't closed."""
    opened: list[tuple[int, bool]] = []
    content = None
    for match in _BRACES.finditer(text):
        token = match[0]
        if token == "}" and opened:
            start, is_box = opened.pop()
            if is_box:
                content = (start, match.start())
        elif token.endswith("{") and token != r"\{":
            opened.append((match.end(), token != "{"))
    if content is None or any(is_box and start > content[1] for start, is_box in opened):
        return None
    return text[slice(*content)]


def read_formula(text: str) -> list[str]:
    r"""Return the content of boxes and math delimiters around the whole text; empty unless one short formula.

    Two texts, if commas may group a number's digits or separate values, as in `100,200`.
    """
    if len(text) > 2 * MAX_CHARS:
        return []
    inner: str | None = text.strip()
    while inner is not None:
        text, inner = inner.rstrip(". \n"), _inside(inner.rstrip(". \n"))
    if text.count(r"\boxed") == 1 and last_boxed(text) is not None:  # n = \boxed{12}
        text = re.sub(r"\\boxed\s*(?=\{)", "", text)
    texts = dict.fromkeys(_normalize(_resolve_commas(text, joins=joins)) for joins in (True, False))
    return [each for each in texts if not _DOLLAR.search(each) and not _BOX.search(each)]


def _normalize(text: str) -> str:
    text = _SPACE.sub(" ", text)
    if number := _SCIENTIFIC.fullmatch(text):
        return rf"{number[1]} \times 10^{{{int(number[2])}}}"
    return text


def _resolve_commas(text: str, *, joins: bool) -> str:
    """Join the digits of numbers, and put a space after commas between values. joins: how to read what may be either."""
    is_spaced = _SPACED_COMMA.search(text) is not None

    def resolve(number: re.Match[str]) -> str:
        first, *groups = re.split(r"\D+", number[0])
        if not _PLAIN_COMMA.search(number[0]):
            is_number = True
        elif first[0] == "0" or any(group[0] == "0" for group in groups):
            is_number = first[0] != "0"
        else:  # (100,200) is a point; (100,200, 300) may have two coordinates, (1,250+300) only one
            before, after = text[: number.start()], text[number.end() :]
            has_operator = _OPERATOR_BEFORE.search(before) or _OPERATOR_AFTER.match(after)
            is_number = joins and (is_spaced or has_operator is not None or _depth(before) == 0)
        return "".join((first, *groups)) if is_number else _PLAIN_COMMA.sub(", ", number[0])

    return _THOUSANDS.sub(resolve, text)


def _depth(text: str) -> int:
    r"""Return how many of ( [ \{ are open; what closes none, as in `B) 1,234`, does not count."""
    depth = 0
    for bracket in _BRACKETS.findall(text):
        depth = max(0, depth + (bracket in ("(", "[", r"\{")) - (bracket in (")", "]", r"\}")))
    return depth


def _inside(text: str) -> str | None:
    for left, right in _MATH_DELIMITERS:
        if len(text) > len(left + right) and text.startswith(left) and text.endswith(right) and text[-2:] != r"\$":
            return text[len(left) : -len(right)].strip()
    content = last_boxed(text)
    is_all = content is not None and re.fullmatch(r"\\boxed\s*\{" + re.escape(content) + r"\}", text)
    return content.strip() if content is not None and is_all else None


def candidates(answer: str, gold: str) -> list[str]:
    """Return the formulas of an answer that must equal the correct one; none if refused.

    Lists, order relations and equations are accepted only if the correct answer is one; `name = value` counts as its
    value.
    """
    answer = answer.strip()
    if not answer or not _is_bounded(answer) or _hides_text(answer, gold):
        return []
    sides = _split_relation(answer)
    if len(sides) > MAX_SIDES or not all(side.strip() for side in sides[1:]):
        return []
    if not sides[0].strip():  # \approx 12
        sides[0] = "x"
    has_name = len(sides) > 1 and _NAME.fullmatch(sides[0]) is not None
    if _SEPARATORS.search(gold):
        value = sides[1] if has_name and len(sides) == 2 else answer
        return [value] if all(_is_value(element) for element in _SEPARATORS.split(value)) else []
    if any(_SEPARATORS.search(side) for side in sides[has_name:]):
        return []
    if len(_split_relation(gold)) == 1:
        return sides[has_name:]
    return [answer] if len(sides) < 3 else [f"{first} = {side}" for first in sides[:1] for side in sides[1:]]


def _is_bounded(answer: str) -> bool:
    """Return whether evaluation is cheap: no long numbers, deep nesting or towers."""
    depth = deepest = 0
    for bracket in _BRACKETS.findall(answer):
        depth += (bracket in "([{") - (bracket in ")]}") if len(bracket) == 1 else 0
        deepest = max(deepest, depth)
    return (
        len(answer) <= MAX_CHARS
        and deepest <= MAX_DEPTH
        and max(map(len, re.findall(r"\d+", answer)), default=0) <= MAX_DIGITS
        and all(int(exponent) <= 10_000 for exponent in _EXPONENT.findall(answer))
        and not _NUMERIC_TOWER.search(answer)
        and not _FACTORIAL.search(answer)
    )


def _hides_text(answer: str, gold: str) -> bool:
    """Return whether math-verify would drop or merge a part that may be another value."""
    notes = _TEXT.findall(answer) if _TEXT.sub("", answer).strip() else []
    return (
        _HIDDEN.search(answer) is not None
        or any(re.search(r"(?<![\w^])\d", note) for note in notes)
        or (_ADJACENT_NUMBERS.search(answer) is not None and not _ADJACENT_NUMBERS.search(gold))
        or not set(_BASE.findall(answer)) <= set(_BASE.findall(gold))
    )


def _is_value(element: str) -> bool:
    sides = _split_relation(element)
    return len(sides) == 1 or (len(sides) == 2 and _NAME.fullmatch(sides[0].lstrip(r"\{([ ")) is not None)


def _split_relation(text: str) -> list[str]:
    """Split at relations outside of brackets."""
    depth, cuts = 0, [(0, 0)]
    marks = sorted((*_BRACKETS.finditer(text), *_RELATION.finditer(text)), key=lambda match: match.start())
    for match in marks:
        if match.re is _BRACKETS:
            depth += (match[0] in "([{") - (match[0] in ")]}") if len(match[0]) == 1 else 0
        elif depth <= 0:
            cuts.append(match.span())
    cuts.append((len(text), len(text)))
    return [text[end:start] for (_, end), (start, _) in pairwise(cuts)]
