"""Stop conditions of answers: tokens and texts, which are part of the answer."""

from collections.abc import Sequence
from typing import NamedTuple

from offbeat.services.chat.stops import find_excess
from offbeat.services.tinker.errors import TinkerError


class StopConditions(NamedTuple):
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]


def read_stops(stop: str | Sequence[int] | Sequence[str] | None, end_ids: Sequence[int]) -> StopConditions:
    """Read `stop` of the SDK; None: the model's end tokens; empty: none; texts: those, and the end tokens.

    Raises TinkerError for too many or too long texts.
    """
    given = [stop] if isinstance(stop, str) else list(stop or ())
    texts = tuple(each for each in given if isinstance(each, str) and each)
    if excess := find_excess(texts):
        raise TinkerError(f"stop has {excess}")
    tokens = tuple(each for each in given if isinstance(each, int))
    return StopConditions(tokens if stop is not None and not texts else tuple(end_ids), texts)
