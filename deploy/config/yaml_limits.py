"""How deep and how large a YAML text may get once its aliases are written out, found without writing them out.

A few lines of anchors and aliases can stand for billions of values, and thousands of brackets for as deep a recursion.
"""

from collections.abc import Iterator

import yaml

MAX_DEPTH = 50
MAX_VALUES = 100_000


def limit_problem(text: str) -> str:
    """Why a YAML text is not read, or nothing. Raises `yaml.YAMLError` where it is no YAML."""
    sizes: dict[str, int] = {}
    open_ones: list[tuple[str | None, int]] = [(None, 0)]  # (anchor, values so far) of each collection that is open
    for event in _events(text):
        if isinstance(event, yaml.CollectionStartEvent):
            open_ones.append((event.anchor, 1))
            if len(open_ones) > MAX_DEPTH:
                return f"nested deeper than {MAX_DEPTH} levels"
            continue
        anchor, size = None, 1
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_ones.pop()
        elif isinstance(event, yaml.AliasEvent):
            size = sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            anchor = event.anchor
        else:
            continue
        if anchor is not None:
            sizes[anchor] = size
        above, so_far = open_ones[-1]
        if so_far + size > MAX_VALUES:
            return f"more than {MAX_VALUES:,} values, with aliases written out"
        open_ones[-1] = (above, so_far + size)
    return ""


def _events(text: str) -> Iterator[yaml.Event]:
    """One at a time, so that reading stops where a limit is passed."""
    loader = yaml.SafeLoader(text)
    try:
        while loader.check_event():
            yield loader.get_event()
    finally:
        loader.dispose()
