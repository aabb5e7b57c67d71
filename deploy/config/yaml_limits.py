"""YAML of bounded cost: limits on depth and size, aliases counted but not expanded, libyaml's parser if available."""

from collections.abc import Iterator
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

from offbeat.trainer.config.issue import ConfigIssue

MAX_DEPTH = 50
MAX_VALUES = 100_000
MAX_CHARS = 1_000_000
MAX_NUMBER_CHARS = 400
"""Float64 needs at most 310 digits before the point."""
TOO_DEEP = ConfigIssue("", f"nested deeper than {MAX_DEPTH} levels")
LIBYAML_TOO_DEEP = "exceeded maximum nesting depth"
"""Of libyaml 0.2.6, at its own, higher limit."""

FastLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Loader(FastLoader):
    """Loader of OmegaConf's dialect: `1e-6` is a number, dates are strings, a duplicate key is an error."""

    yaml_implicit_resolvers = get_yaml_loader().yaml_implicit_resolvers

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                continue
            if key.value in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key.value[:100]!r}", key.start_mark
                )
            keys.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def construct_scalar_safely(self, node: yaml.ScalarNode) -> object:
        """Construct a typed scalar, converting arbitrary errors into YAML's."""
        kind = node.tag.rpartition(":")[2]
        if len(node.value) > MAX_NUMBER_CHARS:
            raise yaml.constructor.ConstructorError(
                None, None, f"a value of type {kind} has at most {MAX_NUMBER_CHARS} characters", node.start_mark
            )
        try:
            return yaml.SafeLoader.yaml_constructors[node.tag](self, node)
        except (ValueError, OverflowError, KeyError, AttributeError):
            raise yaml.constructor.ConstructorError(
                None, None, f"{node.value!r} is no valid {kind}", node.start_mark
            ) from None


for _kind in ("int", "float", "bool", "null", "timestamp"):
    Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", Loader.construct_scalar_safely)


class Dumper(yaml.SafeDumper):
    """Dumper that quotes texts which `Loader` or PyYAML would read as another type, such as `1e-6` and `2026-01-01`."""


Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, ()), *resolvers]
    for first, resolvers in Loader.yaml_implicit_resolvers.items()
}


def write_yaml(tree: object) -> str:
    """Return a YAML text that `load_yaml` and OmegaConf read as `tree`."""
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True)


def load_yaml(text: str) -> object:
    """Parse a YAML text that `check_yaml_limits` accepts; raises `yaml.YAMLError`."""
    loader = Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def check_yaml_limits(text: str) -> ConfigIssue | None:
    """Return the exceeded limit, if any; raises `yaml.YAMLError`."""
    try:
        return _exceeded_limit(text)
    except yaml.MarkedYAMLError as error:
        if error.problem == LIBYAML_TOO_DEEP:
            return TOO_DEEP
        raise


def _exceeded_limit(text: str) -> ConfigIssue | None:
    sizes: dict[str, tuple[int, int]] = {}
    open_collections: list[tuple[str | None, int, int]] = [(None, 0, 0)]  # (anchor, values and characters so far)
    for event in _events(text):
        anchor, values, chars = None, 1, 0
        match event:
            case yaml.CollectionStartEvent():
                open_collections.append((event.anchor, 1, 0))
                if len(open_collections) > MAX_DEPTH:
                    return TOO_DEEP
                continue
            case yaml.CollectionEndEvent():
                anchor, values, chars = open_collections.pop()
            case yaml.AliasEvent():
                if any(event.anchor == each[0] for each in open_collections):
                    return ConfigIssue("", f"line {event.start_mark.line + 1}: alias *{event.anchor} contains itself")
                values, chars = sizes.get(event.anchor, (1, 0))
            case yaml.ScalarEvent():
                anchor, chars = event.anchor, len(event.value)
            case _:
                continue
        if anchor is not None:
            sizes[anchor] = (values, chars)
        parent, values_before, chars_before = open_collections[-1]
        values, chars = values_before + values, chars_before + chars
        if values > MAX_VALUES:
            return ConfigIssue("", f"more than {MAX_VALUES:,} values with aliases expanded")
        if chars > MAX_CHARS:
            return ConfigIssue("", f"more than {MAX_CHARS:,} characters with aliases expanded")
        open_collections[-1] = (parent, values, chars)
    return None


def check_tree_limits(tree: object) -> ConfigIssue | None:
    """Return the limit that a tree without cycles exceeds, if any."""
    level, values = [tree], 0
    for _ in range(MAX_DEPTH + 1):
        values += len(level)
        if values > MAX_VALUES:
            return ConfigIssue("", f"more than {MAX_VALUES:,} values")
        level = [child for each in level for child in _children(each)]
        if not level:
            return None
    return TOO_DEEP


def _children(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _events(text: str) -> Iterator[yaml.Event]:
    """Yield events lazily, to stop at a limit."""
    loader = FastLoader(text)
    try:
        while loader.check_event():
            yield loader.get_event()
    finally:
        loader.dispose()
