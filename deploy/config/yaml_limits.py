"""Limits on depth and size of YAML, aliases counted but not expanded: a few lines can yield billions of values."""

from collections.abc import Iterator

import yaml

from offbeat.trainer.config.issue import ConfigIssue

MAX_DEPTH = 50
MAX_VALUES = 100_000


def check_yaml_limits(text: str) -> ConfigIssue | None:
    """Return the exceeded limit, if any.

    Raises:
        yaml.YAMLError: invalid YAML.
    """
    sizes: dict[str, int] = {}
    open_collections: list[tuple[str | None, int]] = [(None, 0)]  # (anchor, values so far)
    for event in _events(text):
        if isinstance(event, yaml.CollectionStartEvent):
            open_collections.append((event.anchor, 1))
            if len(open_collections) > MAX_DEPTH:
                return ConfigIssue("", f"nested deeper than {MAX_DEPTH} levels")
            continue
        anchor, size = None, 1
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_collections.pop()
        elif isinstance(event, yaml.AliasEvent):
            size = sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            anchor = event.anchor
        else:
            continue
        if anchor is not None:
            sizes[anchor] = size
        parent, count = open_collections[-1]
        if count + size > MAX_VALUES:
            return ConfigIssue("", f"more than {MAX_VALUES:,} values with aliases expanded")
        open_collections[-1] = (parent, count + size)
    return None


def _events(text: str) -> Iterator[yaml.Event]:
    """Yield events lazily, to stop at a limit."""
    loader = yaml.SafeLoader(text)
    try:
        while loader.check_event():
            yield loader.get_event()
    finally:
        loader.dispose()
