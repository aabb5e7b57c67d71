"""Stop conditions of answers: tokens and texts, which are part of the answer."""

from collections.abc import Sequence
from typing import Any

MARGIN_TOKENS = 8
"""Tokens that are decoded before those of a stop text, as some have no text of their own."""


class StopRules:
    def __init__(
        self, tokenizer: Any, end_ids: Sequence[int], stop: str | Sequence[int] | Sequence[str] | None
    ) -> None:
        """stop: as in the SDK; None: the model's end tokens; empty: none."""
        self._tokenizer = tokenizer
        given = [stop] if isinstance(stop, str) else list(stop or ())
        self.texts = [each for each in given if isinstance(each, str) and each]
        tokens = [each for each in given if isinstance(each, int)]
        self.token_ids = tuple(tokens) if stop is not None and not self.texts else tuple(end_ids)
        """Of the engine."""
        self._num_last = MARGIN_TOKENS + max((len(each.encode()) for each in self.texts), default=0)

    def is_end(self, tokens: Sequence[int]) -> bool:
        """Return whether the last tokens contain a stop text."""
        return self._contains_stop(tokens[-self._num_last :]) and self._contains_stop(tokens)

    def find_end(self, tokens: Sequence[int]) -> int | None:
        """Return the number of tokens up to the first stop text, if any."""
        if not self.texts or not self._contains_stop(tokens):
            return None
        low, high = 1, len(tokens)  # a text's first n tokens contain the stop from some n on
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._contains_stop(tokens[:middle]) else (middle + 1, high)
        return low

    def _contains_stop(self, tokens: Sequence[int]) -> bool:
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return any(stop in text for stop in self.texts)
