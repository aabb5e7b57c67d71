"""`offbeat config`, and arguments of commands with a configuration."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offbeat.deploy.cluster.size import Cluster
    from offbeat.deploy.config.run import RunConfig
    from offbeat.trainer.config.issue import ConfigIssue

EXIT_CONFIG = 2

config_app = typer.Typer(help="Check or show a run's configuration.", no_args_is_help=True)

Config = Annotated[
    str | None,
    typer.Argument(metavar="CONFIG", help="A run's YAML file, or the name of a packaged one.", show_default=False),
]
ConfigFolder = Annotated[
    Path | None,
    typer.Option("--config-path", "--config_path", metavar="DIR", help="Folder of --config-name, as in Hydra."),
]
ConfigName = Annotated[
    str | None,
    typer.Option("--config-name", "--config_name", metavar="NAME", help="CONFIG by name, with or without .yaml."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Override values of the file.", show_default=False),
]

WITH_OVERRIDES = {"ignore_unknown_options": True}
"""Context of commands with overrides, to answer `--key value`."""


def locate(
    config: str | None, overrides: list[str] | None, folder: Path | None, name: str | None
) -> tuple[Path, list[str]]:
    """Return the file and the overrides; with `--config-name` all arguments are overrides."""
    if name is None:
        if config is None or folder is not None:
            missing = "CONFIG" if folder is None else "--config-name"
            raise typer.BadParameter(f"missing: a run's YAML file, or --config-path DIR --config-name NAME ({missing})")
        return Path(config), overrides or []
    values = [*([config] if config else []), *(overrides or [])]
    if config and "=" not in config and not config.startswith("-"):
        raise typer.BadParameter(f"{config} beside --config-name: give the file once")
    path = Path(folder or ".", name)
    return path if path.suffix == ".yaml" else path.with_name(f"{path.name}.yaml"), values


def _refuse_options(overrides: list[str]) -> None:
    for position, text in enumerate(overrides):
        if text.startswith("-"):
            name, equals, value = text.lstrip("-").partition("=")
            value = value if equals else next(iter(overrides[position + 1 :]), "VALUE")
            typer.echo(
                f"no such option: {text}; keys are set without dashes: {name.replace('-', '_')}={value}", err=True
            )
            raise typer.Exit(EXIT_CONFIG)


def load(
    path: Path, overrides: list[str] | None, cluster: "Cluster | None" = None, *, for_this_machine: bool = True
) -> "RunConfig":
    """Load a run's configuration, or print its problems and exit.

    cluster: to check against; None: this machine, or none without `for_this_machine`.
    """
    from offbeat.deploy.config.errors import ConfigError
    from offbeat.deploy.config.loader import load_run, read_run

    _refuse_options(overrides or [])

    try:
        if cluster is None:
            return load_run(path, overrides or []) if for_this_machine else read_run(path, overrides or [])
        from offbeat.deploy.cluster.size import check_hosts

        config = load_run(path, overrides or [], cores=cluster.cpus, nodes=cluster.nodes)
        if issues := list(check_hosts(config, cluster)):
            raise ConfigError(issues)
        return config
    except ConfigError as error:
        refuse(path, error.issues)


def refuse(path: Path, issues: "Sequence[ConfigIssue]") -> NoReturn:
    typer.echo(f"{path}: {len(issues)} problems" if len(issues) > 1 else f"{path}:", err=True)
    for issue in issues:
        typer.echo(f"  {issue}", err=True)
    raise typer.Exit(EXIT_CONFIG) from None


@config_app.command("validate", context_settings=WITH_OVERRIDES)
def config_validate(
    config: Config = None,
    overrides: Overrides = None,
    config_path: ConfigFolder = None,
    config_name: ConfigName = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Check against the Ray cluster at HOST:PORT, or `auto`: this machine's."),
    ] = None,
) -> None:
    """Validate a configuration, devices and CPUs by this machine or a cluster; list every problem."""
    load(*locate(config, overrides, config_path, config_name), None if address is None else _measure(address))
    typer.echo("valid")


def _measure(address: str) -> "Cluster":
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # read by the import of Ray; as in `offbeat train`
    from offbeat.deploy.cluster.size import Cluster, NoClusterError

    try:
        return Cluster.at(address)
    except NoClusterError as error:
        typer.echo(f"offbeat: {error}", err=True)
        raise typer.Exit(1) from None


@config_app.command("show", context_settings=WITH_OVERRIDES)
def config_show(
    config: Config = None,
    overrides: Overrides = None,
    config_path: ConfigFolder = None,
    config_name: ConfigName = None,
) -> None:
    """Print the complete configuration as YAML."""
    from offbeat.deploy.config.loader import show_yaml

    typer.echo(show_yaml(load(*locate(config, overrides, config_path, config_name))), nl=False)


@config_app.command("list")
def config_list() -> None:
    """List the packaged configurations; their names are accepted wherever a file is."""
    from offbeat.deploy.config.loader import packaged_configs

    configs = packaged_configs()
    width = max(map(len, configs))
    for name, summary in configs.items():
        typer.echo(f"{name:{width}}  {summary}".rstrip())


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of a configuration, for completion, types and docs in an editor."""
    from offbeat.deploy.config.schema import run_schema_text

    typer.echo(run_schema_text(), nl=False)


@config_app.command("import")
def config_import(
    library: Annotated[
        Literal["roll", "trl", "verl", "prime-rl", "areal"],
        typer.Argument(metavar="roll|trl|verl|prime-rl|areal", help="Library of the files.", show_default=False),
    ],
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Its configurations.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="New file, or folder for several.", show_default=False)],
    trial: Annotated[
        bool, typer.Option("--trial", help="With tiny models on CPUs, to see the run train on this machine.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    command: Annotated[
        Literal["sft", "dpo", "grpo", "rloo", "kto", "reward"] | None,
        typer.Option("--command", help="TRL's command, if neither keys nor name determine it.", show_default=False),
    ] = None,
) -> None:
    """Convert another library's configurations; report what became of each key."""
    from offbeat.deploy.cli.config_import import ImportFailedError, import_files

    try:
        import_files(library, files, out, force=force, trial=trial, echo=typer.echo, command=command)
    except ImportFailedError as error:
        typer.echo(f"offbeat: {error}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None
