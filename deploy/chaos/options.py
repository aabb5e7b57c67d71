"""Options that chaos and soak have alike, and how both write what they found."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

RunFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The run's folder.", show_default="a new one in /tmp")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the report there.", show_default=False)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Of the run.", show_default=False)
]


def write_report(path: Path | None, tree: dict[str, Any]) -> None:
    """As JSON, where a file was named; folders are made."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
