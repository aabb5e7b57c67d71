"""`offbeat ui`."""

from pathlib import Path
from typing import Annotated

import typer

HOST = "127.0.0.1"
RUNS = Path("runs")
EXIT_CONFIG = 2


def ui(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN_FOLDER]", help="A run's folder, or one with several.", show_default="runs"),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any free one.")] = 0,
) -> None:
    """Serve the page of runs that have ended; an active one has it at /ui of its control service."""
    import uvicorn

    from offbeat.deploy.console.folder_run import find_folders, live_url
    from offbeat.deploy.console.server import FolderRuns, create_folder_api
    from offbeat.services.process import free_port

    root = folder or RUNS
    folders = find_folders(root)
    if not folders:
        typer.echo(f"offbeat: there is no run in {root}: name a run's folder, or one that holds some", err=True)
        raise typer.Exit(EXIT_CONFIG)
    if len(folders) == 1 and (url := live_url(folders[0])):
        typer.echo(f"The run is active: {url}/ui")
        return
    runs = FolderRuns(root)
    readable = runs.refresh()
    for name, reason in runs.unreadable.items():
        typer.echo(f"offbeat: run {name} is left out: {reason}", err=True)
    if not readable:
        raise typer.Exit(EXIT_CONFIG)
    for name, archive in readable.items():
        if url := live_url(archive.folder):
            typer.echo(f"Run {name} is active: {url}/ui")
    port = port or free_port()
    typer.echo(f"{len(readable)} run(s) at http://{HOST}:{port}/ui (Ctrl-C ends)")
    uvicorn.run(create_folder_api(runs), host=HOST, port=port, log_level="warning")
