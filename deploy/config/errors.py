"""What is wrong with a configuration, in words: the key's path, what was found, what would be right.

Turns pydantic's error list into `ConfigIssue`s; an unknown key names the nearest valid one.
"""

import types
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from offbeat.trainer.config.issue import ConfigIssue

CLOSE = 0.6
"""Similarity from which on a name is taken for a misspelt other one."""


class ConfigError(Exception):
    """A configuration was refused, for every reason in `issues`."""

    def __init__(self, issues: Sequence[ConfigIssue], source: str = "") -> None:
        self.issues = tuple(issues)
        self.source = source
        super().__init__("\n".join(str(issue) for issue in self.issues))


def collect_issues(error: ValidationError, model: type[BaseModel]) -> list[ConfigIssue]:
    """One problem per key that pydantic refused; the branches of a union count as one."""
    by_path: dict[str, list[tuple[tuple[str | int, ...], ErrorDetails]]] = {}
    for details in error.errors(include_url=False):
        real = tuple(_real_parts(model, details["loc"]))
        by_path.setdefault(_join(real), []).append((real, details))
    return [_issue(path, found, model) for path, found in by_path.items()]


def _issue(
    path: str, found: Sequence[tuple[tuple[str | int, ...], ErrorDetails]], model: type[BaseModel]
) -> ConfigIssue:
    real, details = found[0]
    if details["type"] == "extra_forbidden":
        nearest = nearest_keys(path, model)
        return ConfigIssue(path, f"unknown key; did you mean {' or '.join(f'`{key}`' for key in nearest)}?", nearest[0])
    if details["type"] == "missing":
        return ConfigIssue(path, "required, and missing")
    expected = " or ".join(dict.fromkeys(_expectation(each) for _, each in found))
    if details["type"] == "value_error":
        return ConfigIssue(path, expected)
    return ConfigIssue(_join(real), f"expected {expected}, got {_shown(details['input'])}")


def _expectation(details: ErrorDetails) -> str:
    message = details["msg"]
    for opening in ("Input should be an instance of ", "Input should be ", "Value error, "):
        if message.startswith(opening):
            message = message.removeprefix(opening)
            break
    if details["loc"] and "path_validator" in str(details["loc"][-1]):
        return "a path"
    return message.replace("a valid ", "a ").replace("a integer", "an integer")


def _shown(value: Any) -> str:
    kinds = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "a mapping",
    }
    if value is None:
        return "nothing (null)"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({kinds.get(type(value), type(value).__name__)})"


def _join(parts: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in parts)


def _real_parts(model: type[BaseModel], loc: tuple[str | int, ...]) -> Iterator[str | int]:
    """The parts of pydantic's location that are keys; it also names union branches and `[key]` markers."""
    current: Any = model
    for part in loc:
        current = _without_none(current)
        if isinstance(current, type) and issubclass(current, BaseModel):
            yield part
            field = current.model_fields.get(str(part))
            current = field.annotation if field else None
        elif get_origin(current) in (dict, Mapping):
            if part != "[key]":
                yield part
                current = get_args(current)[1]
        elif get_origin(current) in (tuple, list):
            yield part
            current = get_args(current)[0]
        elif current is None:
            yield part


def _without_none(annotation: Any) -> Any:
    """`X` for `X | None`; other unions stay."""
    if get_origin(annotation) in (Union, types.UnionType):
        branches = [branch for branch in get_args(annotation) if branch is not type(None)]
        return branches[0] if len(branches) == 1 else annotation
    return annotation


def all_keys(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Path of every key; where the user picks the name (a tag), `*` stands for it."""
    for name, field in model.model_fields.items():
        path = (*prefix, name)
        yield path
        annotation = _without_none(field.annotation)
        if get_origin(annotation) in (dict, Mapping):
            path, annotation = (*path, "*"), _without_none(get_args(annotation)[1])
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from all_keys(annotation, path)


def nearest_keys(path: str, model: type[BaseModel]) -> tuple[str, ...]:
    """The valid keys that the unknown key `path` may have been meant to be, the likeliest first, at most three.

    A similar name beside it wins; then equal or similar names elsewhere; then the most similar one beside it.
    """
    parts = tuple(path.split("."))
    parent, leaf = parts[:-1], parts[-1].lower()
    keys = [tuple(_named(key, parts)) for key in all_keys(model)]
    beside = [key for key in keys if key[:-1] == parent]
    elsewhere = [key for key in keys if key[:-1] != parent]

    def similarity(key: tuple[str, ...]) -> float:
        return SequenceMatcher(None, leaf, key[-1].lower()).ratio()

    best = max(beside, key=similarity, default=None)
    far = max(elsewhere, key=similarity, default=None)
    if best is not None and (far is None or similarity(best) >= CLOSE or similarity(far) < CLOSE):
        return (".".join(best),)
    assert far is not None, "a model without keys refuses none"
    return tuple(".".join(key) for key in elsewhere if key[-1] == far[-1])[:3]


def _named(key: tuple[str, ...], like: tuple[str, ...]) -> Iterator[str]:
    """`key` with the names that the user picked (`*`) filled in from the path `like`."""
    for position, part in enumerate(key):
        yield like[position] if part == "*" and key[:position] == like[:position] and position < len(like) else part
