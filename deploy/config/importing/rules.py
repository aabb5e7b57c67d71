"""Rules from a foreign key to ours: a rule returns the key's outcome, or None if it does not apply.

Patterns are dotted: `*` is any part, `a|b` one of several, `a*` a prefix, a last `**` any rest. The first applicable
rule counts.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from offbeat.deploy.config.importing.environment import ANY_REFERENCE
from offbeat.deploy.config.importing.report import KeyPath, KeyReport, Outcome
from offbeat.trainer.config.aliases import canonicalize
from offbeat.trainer.config.issue import SECRET_TABLES

Tree = dict[str, Any]
ABSENT = object()
ALL_CHECKPOINTS = 1_000_000
"""`max_ckpt_to_keep` of libraries that keep all by default."""


@dataclass(frozen=True)
class Key:
    path: KeyPath
    value: Any
    tree: Tree
    """Whole tree, with uniform names of roles."""


Rule = Callable[[Key], Outcome | None]
Rules = Sequence[tuple[str, Rule]]


class WrongTypeError(Exception):
    """A value that its library does not take for a key."""

    def __init__(self, key: KeyPath | str, value: Any, expected: str) -> None:
        super().__init__(f"must be {expected}, not {value!r}")
        self.key = key if isinstance(key, str) else ".".join(key)


NO_NAME = re.compile(r"[^A-Za-z0-9_.-]+")
MAX_NAME = 64
OTHER_SECRET = "another key sets another value, which all processes have here"
UNKNOWN = "no counterpart known: see docs/configuration.md"


def same(note: str = "", *values: object) -> Rule:
    """Drop values that are ours anyway (none: any)."""
    return lambda key: Outcome("same", note=note) if _is_one_of(key.value, values) else None


def no_effect(note: str, *values: object) -> Rule:
    return lambda key: Outcome("no effect", note=note) if _is_one_of(key.value, values) else None


def missing(note: str, *values: object) -> Rule:
    return lambda key: Outcome("no counterpart", note=note) if _is_one_of(key.value, values) else None


def rename(target: str, note: str = "") -> Rule:
    """Take the value under another key; each `*` of the target is the key's part there."""
    return lambda key: Outcome("renamed", fill(target, key.path), key.value, note)


def become(target: str, convert: Callable[[Any], Any], note: str = "", *values: object) -> Rule:
    """Take a converted value; `convert` returns None for an inapplicable one. Raises `WrongTypeError`."""

    def rule(key: Key) -> Outcome | None:
        try:
            value = convert(key.value) if _is_one_of(key.value, values) else None
        except (TypeError, ValueError) as error:
            raise WrongTypeError(key.path, key.value, "a number") from error
        return None if value is None else Outcome("value", fill(target, key.path), value, note)

    return rule


def take_file(target: str) -> Rule:
    """Take a dataset's file, or the first of a list."""

    def rule(key: Key) -> Outcome | None:
        names = [key.value] if isinstance(key.value, str) else key.value
        if not isinstance(names, list) or not names:
            return Outcome("no effect", note="names no file")
        note = "" if len(names) == 1 else f"one file or folder: put them into one ({', '.join(map(str, names[1:]))})"
        return Outcome("renamed", tuple(target.split(".")), names[0], note)

    return rule


def take_stops(target: str) -> Rule:
    """Take stop strings, a text or a list; each `*` of the target is the key's part there."""

    def rule(key: Key) -> Outcome | None:
        stops = [key.value] if isinstance(key.value, str) else key.value
        if not stops:
            return Outcome("same", note="answers end at the model's end token")
        if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
            return None
        place = fill(target, key.path)
        kind = "value" if stops != key.value else "same" if place == key.path else "renamed"
        return Outcome(kind, place, stops)

    return rule


def name_run(key: Key) -> Outcome:
    """Take a run's name, which is also a folder's here: letters, digits, `_`, `.` and `-`."""
    name = NO_NAME.sub("-", str(key.value)).strip("-._")[:MAX_NAME].rstrip("-._")
    if not name or ANY_REFERENCE.search(str(key.value)):
        return Outcome("no counterpart", note="set exp_name")
    return Outcome("renamed" if name == key.value else "value", ("exp_name",), name)


def fill(target: str, path: KeyPath) -> KeyPath:
    return tuple(path[at] if part == "*" else part for at, part in enumerate(target.split(".")))


def _is_one_of(value: Any, values: Sequence[object]) -> bool:
    return not values or any(type(each) is type(value) and each == value for each in values)


def matches(pattern: str, path: KeyPath) -> bool:
    parts = pattern.split(".")
    if parts[-1] == "**":
        parts = parts[:-1]
        path = path[: len(parts)] if len(path) > len(parts) else ()
    return len(parts) == len(path) and all(
        part == "*" or any(_is_like(option, name) for option in part.split("|"))
        for part, name in zip(parts, path, strict=True)
    )


def _is_like(option: str, name: str) -> bool:
    return name.startswith(option[:-1]) if option.endswith("*") else name == option


def leaves(tree: Mapping[str, Any], whole: Sequence[str], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield keys with values; tables that match `whole` are values."""
    for name, value in tree.items():
        at = (*path, str(name))
        if isinstance(value, dict) and value and not any(matches(pattern, at) for pattern in whole):
            yield from leaves(value, whole, at)
        else:
            yield at, value


def apply(rules: Rules, key: Key) -> Outcome | None:
    for pattern, rule in rules:
        if matches(pattern, key.path) and (outcome := rule(key)) is not None:
            return outcome
    return None


def apply_aliases(key: Key) -> Outcome:
    """Return the key by `trainer/config/aliases.py`, or itself."""
    canonical, issues = canonicalize(nest(key.path, key.value))
    if issues:
        return Outcome("no counterpart", note=issues[0].message)
    value = get(canonical, key.path, default=ABSENT)
    if value is not ABSENT and not (value == {} and key.value is None):
        return Outcome("same" if value == key.value else "value", key.path, value)
    moved = next(((path, each) for path, each in leaves(canonical, ()) if each != {}), None)
    if moved is None:
        return Outcome("same", note="changes nothing")
    return Outcome("renamed" if moved[1] == key.value else "value", *moved)


def nest(path: KeyPath, value: Any) -> Tree:
    for name in reversed(path):
        value = {name: value}
    return value


def put(tree: Tree, path: KeyPath, value: Any) -> str:
    """Set a key; return the problem if it has another value, which stays."""
    full = path
    for name in path[:-1]:
        child = tree.setdefault(name, {})
        if not isinstance(child, dict):
            return f"{name} has a value of its own"
        tree = child
    old = tree.setdefault(path[-1], value)
    return "" if old == value else f"another key sets it to {old!r}" if full[0] not in SECRET_TABLES else OTHER_SECRET


def get(tree: Mapping[str, Any], path: KeyPath | str, default: Any = None) -> Any:
    value: Any = tree
    for name in path.split(".") if isinstance(path, str) else path:
        if not isinstance(value, Mapping) or name not in value:
            return default
        value = value[name]
    return value


def get_table(tree: Mapping[str, Any], path: KeyPath | str) -> Tree:
    """Return a table; empty if missing."""
    value = get(tree, path)
    return cast(Tree, value) if isinstance(value, dict) else {}


def remove(tree: Tree, path: KeyPath) -> None:
    *parents, leaf = path
    child = get(tree, tuple(parents))
    if not isinstance(child, dict) or leaf not in child:
        return
    del child[leaf]
    if not child and parents:
        remove(tree, tuple(parents))


def translate(keys: Iterator[tuple[KeyPath, Key]], decide: Callable[[Key], Outcome]) -> tuple[Tree, list[KeyReport]]:
    """Return our tree and the outcome of each original key."""
    tree, reports = Tree(), list[KeyReport]()
    for original, key in keys:
        outcome = decide(key)
        if outcome.target is not None and (problem := put(tree, outcome.target, outcome.value)):
            status = "no counterpart" if problem == OTHER_SECRET else "no effect"
            outcome = Outcome(status, note=f"{'.'.join(outcome.target)}: {problem}")
        elif outcome.status == "same" and outcome.target not in (None, original):
            outcome = Outcome("renamed", outcome.target, outcome.value, outcome.note)
        elif outcome.status == "renamed" and outcome.target == original:
            outcome = Outcome("same", outcome.target, outcome.value, outcome.note)
        reports.append(KeyReport(original, outcome))
    return tree, reports


def translate_all(
    source: Tree, rules: Rules, defaults: Iterable[tuple[str, Any]], whole: Sequence[str] = ()
) -> tuple[Tree, list[KeyReport]]:
    """Return `translate` of a tree, with the library's defaults by key."""
    keys = ((path, Key(path, value, source)) for path, value in leaves(source, whole))
    tree, reports = translate(keys, lambda key: apply(rules, key) or Outcome("no counterpart", note=UNKNOWN))
    return tree, [*reports, *add_defaults(tree, defaults)]


def add_defaults(tree: Tree, defaults: Iterable[tuple[str, Any]]) -> list[KeyReport]:
    """Add the defaults of omitted keys."""
    reports: list[KeyReport] = []
    for name, value in defaults:
        target = tuple(name.split("."))
        if get(tree, target) is None and not put(tree, target, value):
            reports.append(KeyReport((), Outcome("default", target, value)))
    return reports
