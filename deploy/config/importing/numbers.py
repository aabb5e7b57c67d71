"""Numbers of imported files, which are computed with."""

from collections.abc import Mapping
from typing import Any

from offbeat.deploy.config.importing.rules import WrongTypeError, get


def get_number(tree: Mapping[str, Any], path: str, default: float) -> float:
    """Return a number, or the default of a key that is not set; raises `WrongTypeError`."""
    value = get(tree, path)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongTypeError(path, value, "a number")
    return value


def get_count(tree: Mapping[str, Any], path: str, default: int) -> int:
    """Return a whole number, or the default of a key that is not set; raises `WrongTypeError`."""
    value = get(tree, path)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise WrongTypeError(path, value, "a whole number")
    return value
