"""Options and reports of chaos and soak."""

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


def _not_ours(overrides: list[str] | None) -> list[str] | None:
    for override in overrides or ():
        if override.partition("=")[0].strip("+~") in ("output_dir", "exp_name"):
            raise typer.BadParameter(f"{override}: set the folder with --out; the name is fixed")
    return overrides


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Of the run.", show_default=False, callback=_not_ours),
]


def write_report(path: Path | None, tree: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
