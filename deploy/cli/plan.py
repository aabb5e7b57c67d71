"""`offbeat plan`."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.deploy.cli.config import EXIT_CONFIG, Config, ConfigFolder, ConfigName, Overrides, load, locate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import JsonValue

    from offbeat.deploy.config.run import RunConfig
    from offbeat.deploy.plan.measurements import Measured
    from offbeat.deploy.plan.workload import Measures

DISTRIBUTION = "`0.2`, `normal:MEAN:STD`, `lognormal:MEAN:STD`, `exponential:MEAN` or `uniform:FROM:TO`"


def plan(
    config: Config = None,
    overrides: Overrides = None,
    config_path: ConfigFolder = None,
    config_name: ConfigName = None,
    run: Annotated[
        str | None,
        typer.Option("--from", metavar="RUN", help="Measure this run: its name, or its folder.", show_default=False),
    ] = None,
    env_latency: Annotated[
        str | None, typer.Option(metavar="S", help=f"Of an env's step: {DISTRIBUTION}.", show_default=False)
    ] = None,
    turns: Annotated[
        str | None,
        typer.Option(metavar="N", help="Of an episode, in the same form.", show_default="that measured, or max_steps"),
    ] = None,
    turn_latency: Annotated[
        str | None,
        typer.Option(metavar="S", help="Of a sampled turn: seconds, or CONCURRENCY:SECONDS,...", show_default=False),
    ] = None,
    train_s: Annotated[
        float | None, typer.Option(min=0, metavar="S", help="Of training a batch.", show_default=False)
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(min=1, help="Of a trajectory.", show_default="sequence_length, or that measured")
    ] = None,
    update_s: Annotated[
        float | None,
        typer.Option(min=0, metavar="S", help="From publish to served.", show_default="that measured, or 0"),
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Divide so many GPUs.", show_default=False)] = None,
    cpus: Annotated[float | None, typer.Option(min=1, help="Divide so many CPU cores.", show_default=False)] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Of the machine, for the cost.", show_default=False)
    ] = None,
    episodes: Annotated[int, typer.Option(min=100, help="Simulated for a setting and a seed.")] = 6000,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw it as PNG.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Simulate a run: trajectories/s, lag, idle shares, drops, memory, and what would help most.

    Times come from a run that was made (--from), or from the options; options go before what a run measured.
    """
    from rich.console import Console

    from offbeat.deploy.plan.machine import Machine
    from offbeat.deploy.plan.measurements import PlanError
    from offbeat.deploy.plan.plan import make_plan, setup_of
    from offbeat.deploy.plan.table import name_best_change, show_plan, tables_of

    if plot is not None and (plot.suffix != ".png" or not plot.parent.is_dir()):
        typer.echo(f"--plot {plot}: name a .png in a folder that exists", err=True)
        raise typer.Exit(EXIT_CONFIG)
    path, values = locate(config, overrides, config_path, config_name)
    loaded = load(path, values, for_this_machine=False)
    options = _Options(env_latency, turns, turn_latency, train_s, tokens, update_s)
    console = Console(stderr=True)
    try:
        setup_of(loaded)
        measured = _measure(run) if run else None
        measures = options.over(loaded, measured.measures if measured else None)
        with console.status("simulating") as status:
            result = make_plan(
                loaded,
                measures,
                machine=Machine(gpus, cpus),
                measured=measured,
                architecture=_architecture(loaded),
                price_per_hour=price_per_hour,
                episodes=episodes,
                echo=status.update,
            )
    except (PlanError, ValueError) as error:
        typer.echo(f"offbeat: {error}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None
    if as_json:
        shown = {"tables": [asdict(table) for table in tables_of(result)], "advice": name_best_change(result.changes)}
        typer.echo(json.dumps(result.as_tree() | shown, indent=2))
    else:
        show_plan(result, Console(highlight=False))
    if plot is not None:
        from offbeat.deploy.plan.picture import draw_plan

        try:
            draw_plan(plot, result, loaded.exp_name)
        except OSError as error:
            typer.echo(f"--plot {plot}: can't be written: {error}", err=True)
            raise typer.Exit(EXIT_CONFIG) from None


@dataclass(frozen=True, slots=True)
class _Options:
    env_latency: str | None
    turns: str | None
    turn_latency: str | None
    train_s: float | None
    tokens: float | None
    update_s: float | None

    def over(self, config: "RunConfig", measured: "Measures | None") -> "Measures":
        """Return measures, options first; raises `PlanError`, `ValueError`."""
        from offbeat.deploy.plan.distributions import ValueDistribution
        from offbeat.deploy.plan.measurements import PlanError
        from offbeat.deploy.plan.workload import AssumedWorkload, Measures, RetimedWorkload, TurnTimes

        given = {
            "--env-latency": self.env_latency,
            "--turn-latency": self.turn_latency,
            "--train-s": self.train_s,
        }
        missing = [name for name, value in given.items() if value is None]
        if measured is None and missing:
            raise PlanError(f"say which run to measure (--from RUN), or {', '.join(missing)}")
        if self.turns is not None and self.env_latency is None:
            raise PlanError("--turns goes with --env-latency: a measured episode has its own turns")
        tags = config.train_env_manager.tags or tuple(config.custom_envs)
        if unknown := [tag for tag in tags if tag not in config.custom_envs]:
            raise PlanError(f"train_env_manager.tags: custom_envs has no {', '.join(unknown)}")
        max_turns = max(config.custom_envs[tag].max_steps for tag in tags)
        base = measured or Measures(
            AssumedWorkload(ValueDistribution("constant", max_turns), ValueDistribution("constant", 0.0)),
            TurnTimes(((1.0, 0.0),)),
            train_fixed_s=0.0,
            train_per_token_s=0.0,
            tokens=float(config.sequence_length),
        )
        if self.env_latency is not None:
            env_s = ValueDistribution.parse(self.env_latency)
            turns = ValueDistribution.parse(self.turns or str(max_turns))
            is_timed_anew = measured is not None and self.turns is None
            workload = RetimedWorkload(base.workload, env_s) if is_timed_anew else AssumedWorkload(turns, env_s)
            base = replace(base, workload=workload, env_call_s=None)
        if self.turn_latency is not None:
            base = replace(base, turn_s=TurnTimes.parse(self.turn_latency))
        if self.train_s is not None:
            base = replace(base, train_fixed_s=self.train_s, train_per_token_s=0.0)
        if self.tokens is not None:
            base = replace(base, tokens=self.tokens)
        return base if self.update_s is None else replace(base, serve_s=self.update_s)


def _measure(run: str) -> "Measured":
    from offbeat.deploy import run_folder
    from offbeat.deploy.cli.audit import AuditError, find_folder
    from offbeat.deploy.config.errors import ConfigError
    from offbeat.deploy.config.loader import read_run
    from offbeat.deploy.plan.measurements import PlanError, read_measures

    try:
        folder = find_folder(run)
        return read_measures(folder, read_run(folder / run_folder.CONFIG))
    except (AuditError, ConfigError, OSError) as error:
        raise PlanError(str(error)) from error


def _architecture(config: "RunConfig") -> "Mapping[str, JsonValue] | None":
    """Return the policy's configuration, if on this machine and complete."""
    from offbeat.deploy.config.vocabulary import MissingWordsError
    from offbeat.deploy.run_setup import load_architecture

    try:
        return load_architecture(config)
    except (OSError, MissingWordsError):
        return None
