"""Stop conditions of answers: tokens and texts, which are part of the answer."""

from collections.abc import Sequence
from typing import NamedTuple


class StopConditions(NamedTuple):
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]


def read_stops(stop: str | Sequence[int] | Sequence[str] | None, end_ids: Sequence[int]) -> StopConditions:
    """Read `stop` of the SDK; None: the model's end tokens; empty: none; texts: those, and the end tokens."""
    given = [stop] if isinstance(stop, str) else list(stop or ())
    texts = tuple(each for each in given if isinstance(each, str) and each)
    tokens = tuple(each for each in given if isinstance(each, int))
    return StopConditions(tokens if stop is not None and not texts else tuple(end_ids), texts)
