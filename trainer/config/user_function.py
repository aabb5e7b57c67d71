"""Functions of the user's, as `module:function`."""

from typing import Annotated

from pydantic import Field

FUNCTION_PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
UserFunction = Annotated[str, Field(pattern=FUNCTION_PATTERN)]


class _AnyFunction:
    """Value equal to every path of a function, for conditions."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and is_function(other)

    def __hash__(self) -> int:
        return hash("module:function")

    def __str__(self) -> str:
        return "module:function"


ANY_FUNCTION = _AnyFunction()


def is_function(name: str) -> bool:
    return ":" in name
