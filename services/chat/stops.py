"""Stop strings of answers.

Invariant: an answer ends with the first token after which its decoded text, special tokens included, contains a stop
string; that token is part of the answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer

from offbeat.services.chat.tokenizer import load_tokenizer
from offbeat.services.messages.types import Completion, FinishReason

Decode = Callable[[Sequence[int]], str]

MAX_TEXTS, MAX_CHARACTERS = 64, 512
"""Stop strings of a request, and of one of them: an engine compares them between two tokens of all its requests."""
MARGIN_TOKENS = 8
"""Tokens that are decoded before those of a stop string, as some have no text of their own."""
INCOMPLETE = "\ufffd"
"""Text of part of a character's bytes."""
MAX_CHARACTER_BYTES = 4


class StopStrings:
    def __init__(self, decode: Decode, texts: Sequence[str]) -> None:
        """decode: with special tokens; texts: not empty."""
        self.texts = tuple(texts)
        self._decode = decode
        self._last_characters = {text[-1] for text in texts}
        self._end_in_ascii = all(character.isascii() for character in self._last_characters)
        self._num_last = MARGIN_TOKENS + max(len(text.encode()) for text in texts)
        self._completing: dict[int, bool] = {}
        """By token."""

    def is_end(self, tokens: Sequence[int]) -> bool:
        """Return whether an answer, whose tokens but the last contain no stop string, ends here."""
        if not self._may_complete(tokens[-1]):  # most tokens are not decoded
            return False
        return self._may_contain(tokens) and self._contains(self._decode(tokens))

    def find_end(self, tokens: Sequence[int]) -> int | None:
        """Return the number of tokens of the answer up to its first stop string, if any."""
        numbers = (number for number, token in enumerate(tokens, 1) if self._may_complete(token))
        return next((number for number in numbers if self.is_end(tokens[:number])), None)

    def _may_contain(self, tokens: Sequence[int]) -> bool:
        """Return whether the last tokens contain a stop string."""
        for offset in range(
            MAX_CHARACTER_BYTES
        ):  # some tokenizers decode no byte of a run that begins within a character
            text = self._decode(tokens[-self._num_last - offset :])
            if self._contains(text):
                return True
            if INCOMPLETE not in text:
                return False
        return False

    def _may_complete(self, token: int) -> bool:
        """Return whether a stop string may end in a token."""
        if (known := self._completing.get(token)) is None:
            text = self._decode([token, token])  # some tokenizers leave out a text's first space
            is_part = INCOMPLETE in text and not self._end_in_ascii
            known = not text or is_part or not self._last_characters.isdisjoint(text)
            self._completing[token] = known
        return known

    def _contains(self, text: str) -> bool:
        return any(stop in text for stop in self.texts)


def find_excess(texts: Sequence[str]) -> str:
    """Return why stop strings of a request are too many or too long; empty if they are not."""
    if len(texts) > MAX_TEXTS:
        return f"{len(texts)} texts: a request can have {MAX_TEXTS}"
    longest = max(map(len, texts), default=0)
    return f"a text of {longest} characters: it can have {MAX_CHARACTERS}" if longest > MAX_CHARACTERS else ""


@lru_cache(8)
def load_decoder(folder: Path) -> Decode:
    """Load a model folder's tokenizer; raises RolloutError if there is none."""
    backend = cast(Tokenizer, load_tokenizer(folder).backend_tokenizer)
    decode = partial(backend.decode, skip_special_tokens=False)
    return lambda tokens: decode(list(tokens))


@lru_cache(256)
def stop_strings_of(folder: Path, texts: tuple[str, ...]) -> StopStrings:
    """Return the stop strings of a request to a model; raises RolloutError if the folder has no tokenizer."""
    return StopStrings(load_decoder(folder), texts)


def cut_completion(completion: Completion, end: int) -> Completion:
    """Return the first `end` tokens, as an answer that ended there."""
    spans = tuple(span._replace(end=min(span.end, end)) for span in completion.versions if span.start < end)
    return replace(
        completion,
        token_ids=completion.token_ids[:end],
        logprobs=completion.logprobs[:end],
        versions=spans,
        finish_reason=FinishReason.STOP,
        routing=None if completion.routing is None else completion.routing[: end - len(completion.token_ids) or None],
    )
