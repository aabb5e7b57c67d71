"""Keys that each source of prime-rl's training has for itself or inherits, where a run has one value for all tags."""

from typing import Any

from offbeat.deploy.config.importing.prime_rl_files import sources
from offbeat.deploy.config.importing.report import KeyPath, Outcome
from offbeat.deploy.config.importing.rules import ABSENT, Key, Rule, Rules, Tree, apply, get

DEFAULTS = {"algo": {"type": "grpo"}, "group_size": 1, "sampling.temperature": 1.0, "sampling.extra_body": {}}
SAMPLING = "sampling"


def find_values(tree: Tree, field: str) -> list[Any]:
    """Return the value of each source, inherited ones included. field: `algo`, `group_size` or one of `sampling`."""
    shared = find_shared(tree, field)
    return [shared if _inherits(source, field) else get(source, field) for source in sources(tree, "train")]


def find_shared(tree: Tree, field: str) -> Any:
    return get(tree, _shared_path(field), DEFAULTS.get(field))


def agree(tree: Tree, field: str) -> bool:
    """Return whether all sources have one value."""
    values = find_values(tree, field)
    return all(value == values[0] for value in values)


def _inherits(source: Tree, field: str) -> bool:
    value = get(source, field, ABSENT)
    return value is ABSENT or (value is None and field == "algo")


def _shared_path(field: str) -> KeyPath:
    return ("orchestrator", *(("train",) if field.startswith(SAMPLING) else ()), *field.split("."))


def _field(path: KeyPath) -> str:
    """Return the field of a key within its source, or within what the sources share."""
    return ".".join(path[:2]) if path[0] == SAMPLING else path[0]


def take_own(rules: Rules, note: str) -> Rule:
    """Take a source's key by the shared one's rules, if all sources agree. note: what to do if they do not."""

    def rule(key: Key) -> Outcome | None:
        inner = key.path[4:]
        field = _field(inner)
        if agree(key.tree, field):
            return apply(rules, Key(_shared_path(".".join(inner)), key.value, key.tree))
        if get(key.tree, (*key.path[:4], *field.split("."))) == find_shared(key.tree, field):
            return Outcome("same", note="as of all sources")
        return Outcome("no counterpart", note=note)

    return rule


def if_inherited(rule: Rule) -> Rule:
    """Apply a shared key's rule unless every source has its own value, the same as the others'."""

    def of_shared(key: Key) -> Outcome | None:
        field = _field(key.path[2 if key.path[1] == "train" else 1 :])
        found = sources(key.tree, "train")
        if found and agree(key.tree, field) and not any(_inherits(source, field) for source in found):
            return Outcome("no effect", note="each source has its own")
        return rule(key)

    return of_shared
