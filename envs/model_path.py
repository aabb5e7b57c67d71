"""Keys and tables at the location of a validation error, whose parts also name branches of unions."""

import types
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel

Location = tuple[str | int, ...]


class ModelPath(NamedTuple):
    keys: Location
    """Without union branches and `[key]` markers."""
    table: type[BaseModel] | None
    """Model at the location, if any."""


def resolve_location(model: type[BaseModel], location: Location) -> ModelPath:
    keys: list[str | int] = []
    current: Any = model
    for part in location:
        current = without_none(current)
        if _is_model(current):
            keys.append(part)
            field = current.model_fields.get(str(part))
            current = field.annotation if field else None
        elif get_origin(current) in (dict, Mapping):
            if part != "[key]":
                keys.append(part)
                current = get_args(current)[1]
        elif get_origin(current) in (tuple, list):
            keys.append(part)
            current = get_args(current)[0]
        elif (kind := _model_of_kind(current, part)) is not None:
            current = kind
        elif current is None:
            keys.append(part)
    current = without_none(current)
    return ModelPath(tuple(keys), current if _is_model(current) else None)


def without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        branches = [branch for branch in get_args(annotation) if branch is not type(None)]
        return branches[0] if len(branches) == 1 else annotation
    return annotation


def _is_model(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _model_of_kind(annotation: Any, kind: str | int) -> type[BaseModel] | None:
    """Return the branch of a discriminated union."""
    for branch in _branches(annotation):
        if any(kind in get_args(field.annotation) for field in branch.model_fields.values()):
            return branch
    return None


def _branches(annotation: Any) -> list[type[BaseModel]]:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    branches = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else ()
    return [branch for branch in branches if _is_model(branch)]
