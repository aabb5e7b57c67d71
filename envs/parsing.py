"""Parsing of actions from answers, with ROLL's semantics.

Invariant: an invalid text gives `action=None`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

ANSWER_PATTERN = r"<answer>(.*?)</answer>"
THINK_ANSWER_PATTERN = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"
WHOLE_PATTERN = r"^(.*)$"

A = TypeVar("A")


class ParsedAction(NamedTuple, Generic[A]):
    action: A | None
    """None if invalid."""
    content: str
    """Whole answer without a match."""
    think: str = ""


class ActionParser(Generic[A]):
    """Parser by `pattern` (one group: action; two: thought and action), ignoring case."""

    def __init__(self, pattern: str, lookup: Mapping[str, A], special_tokens: Sequence[str] = ()) -> None:
        """Raises ValueError as `compile_pattern`."""
        self._pattern = compile_pattern(pattern)
        self._lookup = {name.lower(): action for name, action in lookup.items()}
        self._special_tokens = tuple(special_tokens)

    def __call__(self, text: str) -> ParsedAction[A]:
        text = self._strip(text)
        match = self._pattern.search(text)
        if match is None:
            return ParsedAction(None, text)
        think, content = ("", match[1]) if self._pattern.groups == 1 else (match[1], match[2])
        content = self._strip(content or "")
        return ParsedAction(self._lookup.get(content.lower()), content, self._strip(think or ""))

    def _strip(self, text: str) -> str:
        for token in self._special_tokens:
            text = text.replace(token, "")
        return text.strip()


def fenced_pattern(languages: str) -> str:
    """Return the pattern of a fenced block without a language or with one of `languages`, a regular expression.

    Blocks of other languages match without the group, so that their closing fence opens no block.
    """
    own = rf"(?i:{languages})?[ \t\r]*\n"
    foreign = rf"```(?!{own})\w[^\n`]*\n.*?(?:```(?!\w)|(?=```\w))"
    return rf"{foreign}|```{own}(.*?)```"


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile an action pattern; `.` matches newlines. Raises ValueError unless valid, with one or two groups."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"action_pattern {pattern!r} is no regular expression: {error}") from error
    if compiled.groups not in (1, 2):
        raise ValueError(
            f"action_pattern {pattern!r} has {compiled.groups} groups: one holds the action, two the thought and the action"
        )
    return compiled
