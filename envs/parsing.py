"""Parsing of actions from answers, with ROLL's semantics.

Invariant: an invalid text gives `action=None`.
"""

import logging
import re
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import regex

logger = logging.getLogger(__name__)

ANSWER_PATTERN = r"<answer>(.*?)</answer>"
THINK_ANSWER_PATTERN = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"
WHOLE_PATTERN = r"^(.*)$"
MAX_MATCH_S = 1.0
"""CPU time of a pattern on an answer: a policy that repeats `<think>` makes one backtrack for minutes."""

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


class ActionPattern:
    """Regular expression of `re`, matched in a bounded time in which other threads run; beyond it nothing matches."""

    def __init__(self, pattern: str) -> None:
        """Raises re.error."""
        self.groups = re.compile(pattern, re.DOTALL).groups
        self._compiled = regex.compile(pattern, regex.DOTALL)

    def search(self, text: str) -> Any:
        """Return the first match, or None."""
        try:
            return self._compiled.search(text, concurrent=True, timeout=MAX_MATCH_S)
        except TimeoutError:
            self._warn(text)
            return None

    def find_all(self, text: str) -> list[Any]:
        """Return all matches."""
        end_s = time.thread_time() + MAX_MATCH_S
        matches: list[Any] = []
        try:
            for match in self._compiled.finditer(text, concurrent=True, timeout=MAX_MATCH_S):
                matches.append(match)
                if time.thread_time() > end_s:
                    raise TimeoutError
        except TimeoutError:
            self._warn(text)
            return []
        return matches

    def _warn(self, text: str) -> None:
        logger.warning(
            "the pattern %r backtracks for over %g s on an answer of %d characters, which counts as one without a match",
            self._compiled.pattern,
            MAX_MATCH_S,
            len(text),
        )


@lru_cache(maxsize=256)
def compile_pattern(pattern: str) -> ActionPattern:
    """Compile an action pattern; `.` matches newlines. Raises ValueError unless valid, with one or two groups."""
    try:
        compiled = ActionPattern(pattern)
    except (re.error, regex.error) as error:
        raise ValueError(f"action_pattern {pattern!r} is no regular expression: {error}") from error
    if compiled.groups not in (1, 2):
        raise ValueError(
            f"action_pattern {pattern!r} has {compiled.groups} groups: one holds the action, two the thought and the action"
        )
    return compiled
