"""Imported configurations as files, and their reports as text."""

from collections.abc import Iterator
from typing import Any

import yaml

from offbeat.deploy.config.importing.environment import restore_references
from offbeat.deploy.config.importing.report import MEANINGS, STATUSES, Imported
from offbeat.deploy.config.loader import escape
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.yaml_limits import Dumper


class _Dumper(Dumper):
    """Texts of several lines as blocks."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def to_yaml(imported: Imported, library: str) -> str:
    """Return the file: our keys in their order, below what was dropped."""
    order = {name: place for place, name in enumerate(("exp_name", "pipeline", "pretrain", *RunConfig.model_fields))}
    tree = dict(sorted(imported.tree.items(), key=lambda item: order.get(item[0], len(order))))
    lines = [f"# Imported by `offbeat config import {library} {imported.source.name}`."]
    if imported.trial:
        lines += ["#", "# Trial:", *(f"#   {_one_line(each)}" for each in imported.trial)]
    if left_out := imported.of_status("no counterpart"):
        lines += ["#", "# Left out:", *(f"#   {_one_line(each)}" for each in left_out)]
    body = yaml.dump(
        restore_references(escape(tree)),
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=None,
        allow_unicode=True,
        width=120,
    )
    return "\n".join([*lines, "", body])


def to_text(imported: Imported, out: str) -> Iterator[str]:
    """Yield the report's lines: keys by outcome."""
    yield f"{imported.source} -> {out}"
    for remark in (*imported.remarks, *(f"trial: {each}" for each in imported.trial)):
        yield f"  {_one_line(remark)}"
    for status in STATUSES:
        keys = imported.of_status(status)
        if keys:
            yield f"\n{len(keys)} {status}: {MEANINGS[status]}"
            yield from (f"  {_one_line(str(each))}" for each in keys)
    yield ""
    if not imported.to_do:
        yield "valid"
        return
    yield f"{len(imported.to_do)} to fill in before it validates:"
    yield from (f"  {_one_line(str(issue))}" for issue in imported.to_do)


def _one_line(text: Any) -> str:
    return " ".join(str(text).split())
