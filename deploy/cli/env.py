"""`offbeat env`."""

from pathlib import Path
from typing import Annotated, Any

import typer

EXIT_FOUND, EXIT_USAGE = 1, 2

INLINE_S, THREAD_S = 0.002, 0.5
"""Longest mean calls for inline execution or a thread."""

env_app = typer.Typer(help="List, check and create environments.", no_args_is_help=True)

EnvType = Annotated[str, typer.Argument(metavar="ENV", help="A name, or `module:Class`.", show_default=False)]
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the env (`env_config`), as YAML.", show_default=False),
]


@env_app.command("list")
def list_envs() -> None:
    """List envs: built in, or under entry points `offbeat.envs`."""
    from rich.console import Console
    from rich.table import Table

    from offbeat.envs import registry

    table = Table("env_type", "settings", "what it is", box=None, pad_edge=False)
    for name in registry.list_names():
        try:
            about, settings = registry.describe(name), ", ".join(registry.setting_names(name))
        except ValueError as error:
            about, settings = str(error), "-"
        table.add_row(name, settings, about)
    Console().print(table)


@env_app.command("check")
def check(
    env: EnvType,
    settings: Settings = None,
    limit_s: Annotated[float, typer.Option(min=0.1, help="Time limit of one call, in seconds.")] = 30.0,
    seeds: Annotated[int, typer.Option(min=2, help="Number of seeds to play.")] = 8,
) -> None:
    """Check an env: text, gymnasium's checks, determinism, generators, timeouts, speed.

    Exit code 1 for problems; advice alone: 0.
    """
    from offbeat.envs.contract_process import check_in_processes

    report = check_in_processes(
        env,
        load_settings(env, settings),
        num_seeds=seeds,
        limit_s=limit_s,
        on_progress=lambda text: typer.secho(text, dim=True, err=True),
    )
    for finding in report.findings:
        colour = typer.colors.RED if finding.severity == "problem" else typer.colors.YELLOW
        typer.secho(f"{finding.severity:8}", fg=colour, nl=False)
        typer.echo(f"{finding.rule}: {finding.message}")
    if report.num_turns:
        times = f"make {_ms(report.make_s)}, reset {_ms(report.reset_s)}, step {_ms(report.step_s)}"
        typer.echo(f"{report.num_episodes} episodes, {report.num_turns} turns; slowest {times}: {_execution(report)}")
        typer.echo(f"one more env takes {report.bytes_per_env / 1024:.3g} KiB")
    if report.sandbox:
        typer.echo(f"programs that it runs are {report.sandbox}")
    if report.problems:
        raise typer.Exit(EXIT_FOUND)
    typer.secho(f"{env} holds the contract", fg=typer.colors.GREEN)


@env_app.command("tasks")
def list_tasks(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[FOLDER]", help="Folder of tasks.", show_default="Offbeat's own")
    ] = None,
    solve: Annotated[
        bool, typer.Option("--solve", help="Run each task's verifier before and after its solution.")
    ] = False,
    image: Annotated[
        str | None,
        typer.Option(
            help="Run them in containers of this image of podman or docker; `task`: of each task's own.",
            show_default=False,
        ),
    ] = None,
    network: Annotated[
        str,
        typer.Option(
            help="With `--image`: the internet for the `verifier`, or as the `task` says, for its solution, too; or `none`."
        ),
    ] = "none",
    build: Annotated[
        bool, typer.Option("--build", help="With `--image task`: first pull or build the tasks' images.")
    ] = False,
) -> None:
    """List tasks in Harbor's format and which need a container. Exit code 1 if any does, or fails --solve."""
    from pydantic import ValidationError

    from offbeat.envs.harbor.report import describe_task
    from offbeat.envs.harbor.task import find_tasks
    from offbeat.envs.harbor.task_set import OWN_TASKS
    from offbeat.envs.sandbox.backend import check_sandbox
    from offbeat.envs.sandbox.network import check_programs
    from offbeat.envs.sandbox.shell import TASK_IMAGE, ShellLimits

    try:
        if build and image != TASK_IMAGE:
            raise ValueError(f"--build has no effect without --image {TASK_IMAGE}")
        limits = ShellLimits.model_validate({"image": image, "network": network})
        if network != "none":
            check_programs()
        if image not in (None, TASK_IMAGE):
            check_sandbox(limits)
        tasks = find_tasks(folder or OWN_TASKS)
    except ValidationError as error:
        typer.echo(_explain_limits(error, image, network), err=True)
        raise typer.Exit(EXIT_USAGE) from None
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_USAGE) from None
    num_bad = 0
    for task in tasks:
        ok, text = describe_task(task, solve=solve, limits=limits, build=build)
        num_bad += not ok
        typer.secho(f"{task.name}: {text}", fg=None if ok else typer.colors.YELLOW)
    typer.echo(f"{len(tasks) - num_bad} of {len(tasks)} tasks {'hold' if solve else 'run here'}")
    if num_bad:
        raise typer.Exit(EXIT_FOUND)


@env_app.command("new")
def new(name: Annotated[str, typer.Argument(metavar="NAME", help="snake_case, such as `word_game`.")]) -> None:
    """Create an env (`NAME.py`), its test and a configuration."""
    from offbeat.deploy.cli.env_template import BadNameError, class_name, write_template

    try:
        written = write_template(Path.cwd(), name)
    except (BadNameError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_USAGE) from None
    module = written[0].stem
    typer.echo(f"wrote {', '.join(path.name for path in written)}; next:")
    typer.echo(f"  offbeat env check {module}:{class_name(module)}")
    typer.echo(f"  offbeat play {module}:{class_name(module)}")
    typer.echo(f"  offbeat train {module}.yaml")


def load_settings(env: str, settings: list[str] | None) -> dict[str, Any]:
    """Parse an env's settings, and download datasets of the hub that they name; exit on error."""
    parsed = parse_settings(settings)
    if not any(key.endswith("dataset_name") for key in parsed):
        return parsed
    from offbeat.deploy.config.hub_datasets import download, resolve_datasets

    tree = {"custom_envs": {env: {"env_type": env, "env_config": parsed}}}
    resolved, issues = resolve_datasets(tree, download)
    for issue in issues:
        typer.echo(f"{issue.path.rpartition('.')[2]}: {issue.message}", err=True)
    if issues:
        raise typer.Exit(EXIT_USAGE)
    return resolved["custom_envs"][env]["env_config"]


def parse_settings(settings: list[str] | None) -> dict[str, Any]:
    """Parse `KEY=VALUE` pairs, values as YAML of a configuration; exit on error."""
    import yaml

    from offbeat.deploy.config.yaml_limits import load_yaml

    parsed: dict[str, Any] = {}
    for text in settings or []:
        key, equals, value = text.partition("=")
        if not key or not equals:
            typer.echo(f"{text!r}: expected KEY=VALUE, a setting of the env", err=True)
            raise typer.Exit(EXIT_USAGE)
        try:
            parsed[key.removeprefix("env_config.")] = load_yaml(value)
        except yaml.YAMLError as error:
            typer.echo(f"{key}: {value!r} is no YAML: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(EXIT_USAGE) from None
    return parsed


def _explain_limits(error: Any, image: str | None, network: str) -> str:
    [key, *_] = [str(part) for each in error.errors() for part in each["loc"]] or ["--network"]
    if key == "image":
        return f"--image {image!r}: expected the name of an image, such as ubuntu:24.04"
    if key == "network":
        return f"--network {network!r}: expected none, verifier or task"
    return f"--network {network}: needs --image, as the kernel sandbox has no network"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"


def _execution(report: Any) -> str:
    if report.mean_s <= INLINE_S:
        return f"{_ms(report.mean_s)} on average, execution: inline fits"
    fits = "execution: thread fits" if report.mean_s <= THREAD_S else "execution: process, or thread if it only waits"
    return f"{_ms(report.mean_s)} on average, {fits}"
