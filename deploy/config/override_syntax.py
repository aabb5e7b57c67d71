"""Overrides of another form than KEY=VALUE, or whose value Hydra can't read."""

import re
from collections.abc import Iterator, Sequence

from offbeat.trainer.config.issue import ConfigIssue

KEY = re.compile(r"[A-Za-z_][\w@./-]*", re.ASCII)


def find_syntax_problems(overrides: Sequence[str], parsed: Sequence[str]) -> Iterator[ConfigIssue]:
    """Yield overrides that Hydra can't read. parsed: as it gets them."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    for override, text in zip(overrides, parsed, strict=True):
        key, equals, value = override.lstrip("+").partition("=")
        if override.startswith("~"):
            continue
        if not equals or not KEY.fullmatch(key):
            yield ConfigIssue("", f"{override!r} is no override: write KEY=VALUE, as in seed=2")
            continue
        try:
            if parser.parse_override(text).is_sweep_override():
                yield ConfigIssue(
                    key, f"{value} names several values: write a list as [a,b], a text in quotes ('\"a,b\"')"
                )
        except HydraException as error:
            reason = str(error).partition("\n")[0].partition(" expecting ")[0]
            yield ConfigIssue(key, f"{value} can't be read ({reason}): {_find_remedy(key, value)}")


def _find_remedy(key: str, value: str) -> str:
    if "'" in value or '"' in value:
        return r"close each quote, and write those within a text as \' or \""
    if value.startswith(("[", "{")):
        return "close its brackets, and write texts with brackets or punctuation in quotes"
    return f"write a text with brackets or punctuation in quotes ('{key}=\"{value}\"')"
