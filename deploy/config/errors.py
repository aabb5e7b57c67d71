"""Configuration errors as `ConfigIssue`s, with similar keys as hints."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from offbeat.envs.model_path import Location, resolve_location, without_none
from offbeat.trainer.config.aliases import find_aliases, find_reason
from offbeat.trainer.config.issue import SECRET_TABLES, ConfigIssue
from offbeat.trainer.config.user_function import FUNCTION_PATTERN

MIN_SIMILARITY = 0.6
"""Similarity of a misspelling."""
MISSPELLED = 0.8
"""Similarity of a key that is hardly another word."""
MAX_ISSUES = 50
"""Each unknown key costs milliseconds."""
URL_USER = re.compile(r"://[^/\s@]*@")
MAX_KEY_CHARS = 100
"""Longest key shown and compared."""


class ConfigError(Exception):
    """Invalid configuration, with all `issues`."""

    def __init__(self, issues: Sequence[ConfigIssue], source: str = "") -> None:
        self.issues = tuple(issues)
        self.source = source
        super().__init__("\n".join(str(issue) for issue in self.issues))


class RightsError(ConfigError):
    """Configuration beyond its sender's rights."""


def collect_issues(error: ValidationError, model: type[BaseModel]) -> list[ConfigIssue]:
    """Return an issue per rejected key, merging union branches."""
    by_path: dict[str, list[tuple[Location, ErrorDetails]]] = {}
    for details in error.errors(include_url=False):
        keys = resolve_location(model, details["loc"]).keys
        by_path.setdefault(_join(keys), []).append((keys, details))
    issues = [_issue(path, errors, model) for path, errors in itertools.islice(by_path.items(), MAX_ISSUES)]
    if (more := len(by_path) - MAX_ISSUES) > 0:
        issues.append(ConfigIssue("", f"and {more:,} more invalid keys"))
    return issues


def _issue(path: str, errors: Sequence[tuple[Location, ErrorDetails]], model: type[BaseModel]) -> ConfigIssue:
    keys, details = errors[0]
    if details["type"] == "extra_forbidden":
        if reason := find_reason(path):
            return ConfigIssue(path, f"this role has no use for it ({reason}): leave it out")
        if len(keys) < len(details["loc"]) and (kind := resolve_location(model, details["loc"][:-1]).table) is not None:
            return _issue_of_kind(path, kind)
        if issue := _issue_of_roll(path, details["input"]):
            return issue
        nearest = find_aliases(path) or nearest_keys(path, model)
        if not nearest:
            return ConfigIssue(path, "unknown key, and none is like it: `offbeat config show` lists all")
        return ConfigIssue(path, f"unknown key; did you mean {' or '.join(f'`{key}`' for key in nearest)}?", nearest[0])
    if details["type"] in ("union_tag_invalid", "union_tag_not_found"):
        key, kinds = "kind", str(details.get("ctx", {}).get("expected_tags", ""))
        return ConfigIssue(_join((*keys, key)), f"expected {kinds}" if kinds else "required, and missing")
    if details["type"] == "missing":
        return ConfigIssue(path, "required, and missing")
    expected = " or ".join(dict.fromkeys(_format_expectation(error) for _, error in errors))
    if details["type"] == "value_error":
        return ConfigIssue(path, expected)
    described = _kind(details["input"]) if _is_secret(keys, details["input"]) else _describe(details["input"])
    return ConfigIssue(_join(keys), f"expected {expected}, got {described}")


def _is_secret(keys: Location, value: object) -> bool:
    """Return whether a value may be or hold a password or token, in another form than expected."""
    is_of_table = bool(keys) and str(keys[0]) in SECRET_TABLES
    is_plain_number = isinstance(value, int | float) and "token" not in str(keys[-1:])
    return (is_of_table and not is_plain_number) or URL_USER.search(str(value)) is not None


def _issue_of_roll(path: str, value: object) -> ConfigIssue | None:
    """Return the issue of a key that ROLL has, as the importer would report it."""
    from offbeat.deploy.config.importing.roll_rules import find_counterpart

    outcome = find_counterpart(tuple(path.split(".")), value)
    if outcome is None:
        return None
    if outcome.target is None:
        return ConfigIssue(path, f"ROLL's key, not one of Offbeat's ({outcome.note}): leave it out")
    target = ".".join(outcome.target)
    note = f" ({outcome.note})" if outcome.note else ""
    return ConfigIssue(path, f"ROLL's key, here `{target}`{note}", target)


def is_like_known(key: str, value: object, model: type[BaseModel]) -> bool:
    """Return whether an unknown top-level key is a misspelling, or one of ROLL's with an effect; tables of envs are not."""
    from offbeat.deploy.config.importing.roll_rules import find_counterpart

    if isinstance(value, dict) and all(isinstance(each, dict) and "env_type" in each for each in value.values()):
        return False
    outcome = find_counterpart((key,), value)
    if outcome is not None:
        return outcome.status not in ("same", "no effect")
    return any(SequenceMatcher(None, key.lower(), name).ratio() >= MISSPELLED for name in model.model_fields)


def _format_expectation(details: ErrorDetails) -> str:
    message = details["msg"]
    for opening in ("Input should be an instance of ", "Input should be ", "Value error, "):
        if message.startswith(opening):
            message = message.removeprefix(opening)
            break
    if details["type"] == "string_pattern_mismatch" and details.get("ctx", {}).get("pattern") == FUNCTION_PATTERN:
        return "`module:function`"
    if details["loc"] and "path_validator" in str(details["loc"][-1]):
        return "a path"
    return message.replace("a valid ", "a ").replace("a integer", "an integer")


def _describe(value: Any) -> str:
    if value is None:
        return _kind(value)
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({_kind(value)})"


def _kind(value: object) -> str:
    kinds: dict[type, str] = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "a mapping",
        type(None): "nothing (null)",
    }
    return kinds.get(type(value), type(value).__name__)


def _join(parts: Sequence[str | int]) -> str:
    return ".".join(_shorten(str(part)) for part in parts)


def _shorten(key: str) -> str:
    return key if len(key) <= MAX_KEY_CHARS else f"{key[: MAX_KEY_CHARS - 3]}..."


def _issue_of_kind(path: str, kind: type[BaseModel]) -> ConfigIssue:
    """Name the similar key, else the keys that the kind alone has and those of every kind."""
    parent, _, leaf = path.rpartition(".")

    def similarity(name: str) -> float:
        return SequenceMatcher(None, leaf.lower(), name.lower()).ratio()

    nearest = max(kind.model_fields, key=similarity)
    if similarity(nearest) >= MIN_SIMILARITY:
        near = f"{parent}.{nearest}"
        return ConfigIssue(path, f"unknown key of this kind; did you mean `{near}`?", near)
    own = {name: True for base in kind.__mro__[:-1] for name in vars(base).get("__annotations__", {})}
    names = ", ".join(f"`{name}`" for name in own if name in kind.model_fields and name != "kind")
    return ConfigIssue(path, f"unknown key of this kind; its keys are {names}")


def all_keys(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield keys' paths, with `*` for user-chosen names."""
    for name, field in model.model_fields.items():
        path = (*prefix, name)
        yield path
        annotation = without_none(field.annotation)
        if get_origin(annotation) in (dict, Mapping):
            path, annotation = (*path, "*"), without_none(get_args(annotation)[1])
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from all_keys(annotation, path)


def nearest_keys(path: str, model: type[BaseModel]) -> tuple[str, ...]:
    """Return up to three similar keys, in `path`'s table or elsewhere."""
    parts = tuple(path.split("."))
    parent, leaf = parts[:-1], parts[-1].lower()
    keys = [tuple(_fill_names(key, parts)) for key in all_keys(model)]
    siblings = [key for key in keys if key[:-1] == parent]
    elsewhere = [key for key in keys if key[:-1] != parent]

    def similarity(key: tuple[str, ...]) -> float:
        return SequenceMatcher(None, leaf, key[-1].lower()).ratio()

    best = max(siblings, key=similarity, default=None)
    far = max(elsewhere, key=similarity, default=None)
    if best is not None and similarity(best) >= MIN_SIMILARITY:
        return (".".join(best),)
    if far is None or similarity(far) < MIN_SIMILARITY:
        return ()
    return tuple(".".join(key) for key in elsewhere if key[-1] == far[-1])[:3]


def _fill_names(key: tuple[str, ...], like: tuple[str, ...]) -> Iterator[str]:
    """Yield `key`'s parts, each `*` replaced from `like`."""
    for position, part in enumerate(key):
        yield like[position] if part == "*" and key[:position] == like[:position] and position < len(like) else part
