import re
from pathlib import Path
from typing import Annotated

import typer

from offbeat.deploy.cli.options import refuse_unread
from offbeat.services.live_settings import LIVE_SETTINGS

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TINKER_URL = f"{DEFAULT_URL}/tinker"
FILTERS = ("state", "tag", "step", "sort", "offset", "limit")
"""Options of `runs groups` for lists alone."""
EXIT_CODES = """Exit codes: 0 done; 1 the service can't be reached or failed, or the watched run has failed; 2 the
configuration, a value or the command line was refused; 3 there is no such run; 4 it makes no sense for what a run is at,
or another run has the same folder or engine; 5 the token is missing or wrong, or the configuration is beyond its rights;
6 the watched run finished without having trained anything."""

runs_app = typer.Typer(
    help="Start, control and watch runs over REST.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def is_model_id(run: str) -> bool:
    """Return whether it is a Tinker model's id: no run's name, and hardly a folder, has its form."""
    return re.search(r":train:\d+$", run) is not None


def _refuse_model(run: str) -> str:
    if is_model_id(run):
        raise typer.BadParameter(
            f"{run} is a model of Tinker's API, which its client controls; `offbeat runs models`, `why` and `groups`, "
            "and `offbeat audit` show it",
            param_hint="RUN",
        )
    return run


RunId = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's name.", show_default=False, callback=_refuse_model)
]
RunOrModelId = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's name, or a Tinker model's id.", show_default=False)
]
ConfigPath = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="A run's YAML file, or the name of a packaged one.", show_default=False),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Override values of the file.", show_default=False),
]
Url = Annotated[str, typer.Option("--url", envvar="OFFBEAT_URL", metavar="URL", help="URL of the control service.")]
Token = Annotated[
    str | None,
    typer.Option("--token", envvar="OFFBEAT_TOKEN", metavar="TOKEN", help="Bearer token.", show_default=False),
]
TinkerUrl = Annotated[
    str, typer.Option("--tinker-url", envvar="TINKER_BASE_URL", metavar="URL", help="URL of a Tinker server.")
]
TinkerKey = Annotated[
    str,
    typer.Option("--tinker-key", envvar="TINKER_API_KEY", metavar="KEY", help="Its API key.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print the service's answer as JSON.")]


@runs_app.command(epilog=EXIT_CODES)
def start(
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the configuration only.")] = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
    json: Json = False,
) -> None:
    """Start a run and print its id. Paths are relative to the current folder."""
    from offbeat.deploy.cli.runs.calls import start_run

    raise typer.Exit(start_run(url, token, config, overrides or [], dry_run=dry_run, as_json=json))


@runs_app.command("list", epilog=EXIT_CODES)
def list_runs(
    state: Annotated[
        list[str] | None, typer.Option("--state", metavar="STATE", help="List only runs in this state; repeatable.")
    ] = None,
    name: Annotated[
        str, typer.Option("--name", metavar="GLOB", help="List only runs whose name matches, e.g. 'lake-*'.")
    ] = "*",
    limit: Annotated[int, typer.Option("--limit", min=1, max=500, help="Maximum number of runs.")] = 50,
    after: Annotated[
        str | None, typer.Option("--after", metavar="PLACE", help="Continue a list, as it says.", show_default=False)
    ] = None,
    url: Url = DEFAULT_URL,
    token: Token = None,
    json: Json = False,
) -> None:
    """List runs, newest first. Models that clients train by Tinker's API: `offbeat runs models`."""
    from offbeat.deploy.cli.runs.calls import list_them

    raise typer.Exit(list_them(url, token, state or [], name, limit, after, as_json=json))


@runs_app.command(epilog=EXIT_CODES)
def models(
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="Maximum number of models.")] = 50,
    tinker_url: TinkerUrl = DEFAULT_TINKER_URL,
    tinker_key: TinkerKey = "",
    json: Json = False,
) -> None:
    """List the models that an API key's clients train by Tinker's API, newest first."""
    from offbeat.deploy.cli.runs.models import list_models

    raise typer.Exit(list_models(tinker_url, tinker_key, limit, as_json=json))


@runs_app.command(epilog=EXIT_CODES)
def show(run: RunId, url: Url = DEFAULT_URL, token: Token = None, json: Json = False) -> None:
    """Show a run: state, step, staleness, rates, counters, settings, paths."""
    from offbeat.deploy.cli.runs.calls import show_run

    raise typer.Exit(show_run(url, token, run, as_json=json))


@runs_app.command(epilog=EXIT_CODES)
def watch(run: RunId, url: Url = DEFAULT_URL, token: Token = None, json: Json = False) -> None:
    """Follow a run until it ends; Ctrl-C stops watching alone. --json prints one event per line."""
    from offbeat.deploy.cli.runs.watch import watch_run

    raise typer.Exit(watch_run(url, token, run, as_json=json))


@runs_app.command(epilog=EXIT_CODES)
def stop(
    run: RunId,
    now: Annotated[bool, typer.Option("--now", help="Without draining and without a checkpoint.")] = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
    json: Json = False,
) -> None:
    """Stop a run: drain, save a checkpoint, release resources."""
    from offbeat.deploy.cli.runs.calls import send_command

    raise typer.Exit(send_command(url, token, run, "stop now" if now else "stop", as_json=json))


@runs_app.command(epilog=EXIT_CODES)
def pause(run: RunId, url: Url = DEFAULT_URL, token: Token = None, json: Json = False) -> None:
    """Pause a run: no episode or step begins."""
    from offbeat.deploy.cli.runs.calls import send_command

    raise typer.Exit(send_command(url, token, run, "pause", as_json=json))


@runs_app.command(epilog=EXIT_CODES)
def resume(run: RunId, url: Url = DEFAULT_URL, token: Token = None, json: Json = False) -> None:
    """Resume a paused run."""
    from offbeat.deploy.cli.runs.calls import send_command

    raise typer.Exit(send_command(url, token, run, "resume", as_json=json))


@runs_app.command(epilog=EXIT_CODES)
def why(
    run: RunOrModelId,
    plan: Annotated[
        bool, typer.Option("--plan", help="Also simulate what a change would do; needs the run's folder here.")
    ] = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
    tinker_url: TinkerUrl = DEFAULT_TINKER_URL,
    tinker_key: TinkerKey = "",
    json: Json = False,
) -> None:
    """Show what each component waits for, and what to change; of a Tinker model: what it waits for."""
    from offbeat.deploy.cli.runs.calls import explain_run
    from offbeat.deploy.cli.runs.models import explain_model

    if plan and json:
        raise typer.BadParameter("it prints text; for JSON: offbeat plan CONFIG --from RUN --json", param_hint="--plan")
    if is_model_id(run):
        if plan:
            raise typer.BadParameter("a Tinker model has no run's folder to simulate from", param_hint="--plan")
        raise typer.Exit(explain_model(tinker_url, tinker_key, run, as_json=json))
    raise typer.Exit(explain_run(url, token, run, as_json=json, plans=plan))


@runs_app.command(epilog=EXIT_CODES)
def quarantine(run: RunId, url: Url = DEFAULT_URL, token: Token = None, json: Json = False) -> None:
    """List undecodable trajectories and reasons; they never reach the trainer."""
    from offbeat.deploy.cli.runs.calls import show_quarantine

    raise typer.Exit(show_quarantine(url, token, run, as_json=json))


@runs_app.command(epilog=EXIT_CODES)
def scale(
    run: RunId,
    env_workers: Annotated[int | None, typer.Option("--env-workers", min=1, help="Env worker processes.")] = None,
    replicas: Annotated[int | None, typer.Option("--replicas", min=1, help="vLLM engines.")] = None,
    url: Url = DEFAULT_URL,
    token: Token = None,
    json: Json = False,
) -> None:
    """Change the numbers of env workers and engines."""
    from offbeat.deploy.cli.runs.calls import change_run

    sizes = {"num_workers": env_workers, "num_replicas": replicas}
    values = [f"{name}={value}" for name, value in sizes.items() if value is not None]
    if not values:
        raise typer.BadParameter("say --env-workers, --replicas, or both")
    raise typer.Exit(change_run(url, token, run, values, as_json=json))


@runs_app.command("set", help=f"Change live settings of a running run: {', '.join(LIVE_SETTINGS)}.", epilog=EXIT_CODES)
def set_values(
    run: RunId,
    values: Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", help="What to change.", show_default=False)],
    url: Url = DEFAULT_URL,
    token: Token = None,
    json: Json = False,
) -> None:
    from offbeat.deploy.cli.runs.calls import change_run

    raise typer.Exit(change_run(url, token, run, values, as_json=json))


@runs_app.command(epilog=EXIT_CODES)
def delete(
    run: RunId,
    files: Annotated[bool, typer.Option("--files", help="Remove what it wrote into its folder, too.")] = False,
    url: Url = DEFAULT_URL,
    token: Token = None,
    json: Json = False,
) -> None:
    """Delete the record of an ended run."""
    from offbeat.deploy.cli.runs.calls import delete_run

    raise typer.Exit(delete_run(url, token, run, files=files, as_json=json))


@runs_app.command(epilog=EXIT_CODES)
def groups(
    context: typer.Context,
    run: RunOrModelId,
    number: Annotated[
        int | None, typer.Argument(metavar="[GROUP]", help="Show this one with its members.", show_default=False)
    ] = None,
    state: Annotated[
        list[str] | None, typer.Option("--state", metavar="STATE", help="List only groups in this state; repeatable.")
    ] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Of this env.", show_default=False)] = None,
    step: Annotated[int | None, typer.Option("--step", help="Consumed by this step.", show_default=False)] = None,
    sort: Annotated[
        str, typer.Option("--sort", help="number, spread, tokens, ratio, staleness or duration; odd ones first.")
    ] = "number",
    offset: Annotated[int, typer.Option("--offset", min=0, help="Groups to skip.")] = 0,
    limit: Annotated[int, typer.Option("--limit", min=1, max=500, help="Maximum number of groups.")] = 50,
    url: Url = DEFAULT_URL,
    token: Token = None,
    tinker_url: TinkerUrl = DEFAULT_TINKER_URL,
    tinker_key: TinkerKey = "",
    json: Json = False,
) -> None:
    """List what became of groups, or show one; of a Tinker model: what was sampled, by version of the weights."""
    from offbeat.deploy.cli.runs.models import list_samples
    from offbeat.deploy.cli.runs.recorded import list_groups, show_group

    if is_model_id(run):
        if number is not None:
            raise typer.BadParameter("a Tinker model's samples form no groups here: leave it out", param_hint="GROUP")
        refuse_unread(context, "a Tinker model's samples form no groups here: leave it out", *FILTERS)
        raise typer.Exit(list_samples(tinker_url, tinker_key, run, as_json=json))
    if number is not None:
        refuse_unread(context, f"it chooses groups of a list, and group {number} is one: leave either out", *FILTERS)
        raise typer.Exit(show_group(url, token, run, number, as_json=json))
    filters = {"state": state or [], "tag": tag, "step": step, "sort": sort, "offset": offset, "limit": limit}
    raise typer.Exit(list_groups(url, token, run, filters, as_json=json))


@runs_app.command(epilog=EXIT_CODES)
def trajectory(
    run: RunId,
    group: Annotated[int, typer.Argument(metavar="GROUP", min=0, show_default=False)],
    index: Annotated[int, typer.Argument(metavar="INDEX", min=0, show_default=False)],
    url: Url = DEFAULT_URL,
    token: Token = None,
    json: Json = False,
) -> None:
    """Show a recorded trajectory turn by turn; --json: token by token."""
    from offbeat.deploy.cli.runs.recorded import show_trajectory

    raise typer.Exit(show_trajectory(url, token, run, group, index, as_json=json))


Step = Annotated[int, typer.Option("--step", min=0, help="Optimizer step.", show_default=False)]


@runs_app.command(epilog=EXIT_CODES)
def fork(
    run: RunId,
    step: Step,
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys that differ; values as JSON or text.", show_default=False),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Of the new run.", show_default="RUN-fork-STEP")] = None,
    url: Url = DEFAULT_URL,
    token: Token = None,
    json: Json = False,
) -> None:
    """Start a run from the checkpoint of a step of another one, and print its id."""
    from offbeat.deploy.cli.runs.derived import fork_run

    raise typer.Exit(fork_run(url, token, run, step, name, values or [], as_json=json))


@runs_app.command(epilog=EXIT_CODES)
def reproduce(run: RunId, step: Step, url: Url = DEFAULT_URL, token: Token = None, json: Json = False) -> None:
    """Train recorded steps again and compare the weights; exits with 1 if they differ. Ctrl-C ends waiting alone."""
    from offbeat.deploy.cli.runs.derived import reproduce_run

    raise typer.Exit(reproduce_run(url, token, run, step, as_json=json))
