"""`offbeat tinker`."""

import typer

from offbeat.deploy.cli.config import EXIT_CONFIG, Config, ConfigFolder, ConfigName, Overrides, load, locate


def tinker(
    config: Config = None,
    overrides: Overrides = None,
    config_path: ConfigFolder = None,
    config_name: ConfigName = None,
) -> None:
    """Serve Tinker's API: training and sampling of LoRA models on the run's policy, by the `tinker` SDK."""
    from offbeat.deploy.config.vocabulary import MissingWordsError
    from offbeat.deploy.run_marker import FolderInUseError
    from offbeat.deploy.tinker.server import TinkerServer, serve
    from offbeat.services.errors import MeshError

    path, values = locate(config, overrides, config_path, config_name)
    loaded = load(path, values)
    try:
        server = TinkerServer(loaded)
        typer.echo(f"Tinker's API of base model {server.model_name!r}: TINKER_BASE_URL={server.url} (Ctrl-C ends)")
        typer.echo("Calls wait until the engine has started.")
        serve(server)
    except (MeshError, FolderInUseError, MissingWordsError, OSError) as error:
        typer.echo(f"offbeat: {error}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None
