"""Copies of dataclasses and messages with changed fields."""

import dataclasses
from typing import Any, TypeVar, cast

import msgspec

T = TypeVar("T")


def replace(value: T, **changes: Any) -> T:
    """Return a copy of a dataclass instance or of a message with changed fields."""
    if isinstance(value, msgspec.Struct):
        return cast(T, msgspec.structs.replace(value, **changes))
    return cast(T, dataclasses.replace(cast(Any, value), **changes))
