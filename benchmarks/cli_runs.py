"""Benchmarks of training runs, and of everything.

Invariant: commands import heavy modules.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from offbeat.benchmarks.cli_options import Distribution, JsonFile, PlanPart, Quick, Work, run_bench

runs_app = typer.Typer()


@runs_app.command("async")
def bench_async(
    work: Annotated[Work, typer.Option(help="vLLM and DeepSpeed on the tiny policy, or times alone.")] = Work.real,
    mean: Annotated[float, typer.Option(metavar="S", help="Mean latency of an env's step.")] = 0.2,
    std: Annotated[float, typer.Option(metavar="S", help="Its standard deviation.")] = 0.2,
    distribution: Annotated[
        list[Distribution] | None, typer.Option(help="Of the latency; may be repeated. Default: both.")
    ] = None,
    staleness: Annotated[
        list[float] | None, typer.Option(metavar="BOUND", help="max_staleness to compare with 0; may be repeated.")
    ] = None,
    steps: Annotated[int, typer.Option(min=3, help="Batches of each run.")] = 10,
    batch: Annotated[int, typer.Option(min=1, help="Trajectories of a batch.")] = 64,
    env_groups: Annotated[int, typer.Option(min=1, help="Groups of 8 in play.")] = 16,
    train_s: Annotated[float, typer.Option(metavar="S", help="Of a batch, with --work emulated.")] = 0.5,
    answer_s: Annotated[float, typer.Option(metavar="S", help="Of a turn, with --work emulated.")] = 0.02,
    json: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Compare synchronous and asynchronous training with the slower side alone."""
    from offbeat.benchmarks import async_training

    options = async_training.AsyncOptions(
        work=work.value,
        distributions=tuple(member.value for member in distribution or Distribution),
        mean_s=mean,
        std_s=std,
        staleness=tuple(staleness or (0.5, 1.0, 2.0, 4.0)),
        steps=steps,
        batch=batch,
        env_groups=env_groups,
        train_s=train_s,
        answer_s=answer_s,
    )
    if quick:
        options = async_training.AsyncOptions(
            work="emulated", distributions=("lognormal",), mean_s=0.01, std_s=0.02, staleness=(1.0,),
            steps=4, batch=16, env_groups=4, train_s=0.05, answer_s=0.002,
        )  # fmt: skip
    run_bench("async", async_training.run, options, json)


@runs_app.command("redundancy")
def bench_redundancy(
    distribution: Annotated[
        list[Distribution] | None, typer.Option(help="Of the latency; may be repeated. Default: both.")
    ] = None,
    mean: Annotated[float, typer.Option(metavar="S", help="Mean latency of an env's step.")] = 0.1,
    normal_std: Annotated[float, typer.Option(metavar="S", help="Standard deviation, normal.")] = 0.05,
    lognormal_std: Annotated[float, typer.Option(metavar="S", help="Standard deviation, log-normal.")] = 0.5,
    rounds: Annotated[int, typer.Option(min=1, help="Batches of each setting.")] = 3,
    json: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Measure the time to collect 32 groups of 8, with and without redundancy."""
    from offbeat.benchmarks import redundancy

    options = redundancy.RedundancyOptions(
        distributions=tuple(member.value for member in distribution or Distribution),
        mean_s=mean,
        normal_std_s=normal_std,
        lognormal_std_s=lognormal_std,
        rounds=rounds,
    )
    if quick:
        options = redundancy.RedundancyOptions(
            distributions=("lognormal",), mean_s=0.01, lognormal_std_s=0.05, num_groups=4, group_size=2, over=((5, 3),),
            rounds=1,
        )  # fmt: skip
    run_bench("redundancy", redundancy.run, options, json)


@runs_app.command("plan")
def bench_plan(
    part: Annotated[list[PlanPart] | None, typer.Option(help="Rows of which benchmark. Default: both.")] = None,
    distribution: Annotated[
        list[Distribution] | None, typer.Option(help="Of the latency; may be repeated. Default: both.")
    ] = None,
    steps: Annotated[int, typer.Option(min=3, help="Batches of each row of async.")] = 24,
    rounds: Annotated[int, typer.Option(min=2, help="Batches of each row of redundancy.")] = 12,
    json: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Predict rows of `bench async` and `bench redundancy` by `offbeat plan` from one other row; measure them."""
    from offbeat.benchmarks import plan_accuracy

    options = plan_accuracy.quick() if quick else plan_accuracy.PlanOptions.of(steps, rounds)
    options = replace(
        options,
        parts=tuple(member.value for member in part or PlanPart),
        distributions=tuple(member.value for member in distribution or ()) or options.distributions,
    )
    run_bench("plan", plan_accuracy.run, options, json)


@runs_app.command("peer")
def bench_peer(
    settings: Annotated[str, typer.Option(metavar="LIST", help="Of a, b, c, d, sft and dpo, with commas.")] = "a,b,c",
    seeds: Annotated[str, typer.Option(metavar="LIST", help="Of the runs, with commas.")] = "1,2,3",
    sides: Annotated[str, typer.Option(metavar="LIST", help="Who is run or read: offbeat, trl.")] = "offbeat,trl",
    steps: Annotated[int | None, typer.Option(min=8, help="Of each run. Default: the setting's own.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Of the runs' configuration; give --folder one of its own."),
    ] = None,
    folder: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Holds the runs; those with these --steps and --set are not measured again."),
    ] = Path("runs/bench-peer"),
    venv: Annotated[
        Path | None, typer.Option(metavar="DIR", help="TRL's own, made if absent. Default: in the user's cache.")
    ] = None,
    smollm2: Annotated[Path, typer.Option(metavar="DIR", help="The model of setting c.")] = Path("models/smollm2"),
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Success over wall time, as PNG.")] = None,
    together: Annotated[
        bool, typer.Option("--together", help="TRL's turns wait for the whole batch, instead of taking who is ready.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what is there.")] = False,
    json: JsonFile = None,
) -> None:
    """Compare with TRL: GRPOTrainer's success over wall time and trajectories/s; SFTTrainer's and DPOTrainer's tokens/s.

    a: tiny policy, instant env. b: env steps of 0.1 s on average, heavy-tailed. c: SmolLM2-135M. d: as a, from the
    command to a success of .85, starts and warm start included. sft, dpo: optimizer steps of 1M parameters on rows of
    equal and of ragged lengths.
    """
    from offbeat.benchmarks.harness.pace import PacedSideError
    from offbeat.benchmarks.harness.venv import VenvError
    from offbeat.benchmarks.peer import comparison, options
    from offbeat.deploy.config.errors import ConfigError

    try:
        chosen = options.parse(
            settings=settings, seeds=seeds, sides=sides, steps=steps, folder=folder, venv=venv, smollm2=smollm2,
            plot=plot, together=together, fresh=fresh, overrides=tuple(set_ or ()),
        )  # fmt: skip
        run_bench("peer", comparison.run, chosen, json)
    except (options.PeerError, PacedSideError, VenvError, ConfigError) as error:
        typer.echo(f"offbeat: {error}", err=True)
        raise typer.Exit(2) from None


@runs_app.command("plot")
def bench_plot(
    result: Annotated[Path, typer.Argument(metavar="RESULT.json", exists=True, dir_okay=False)],
    plot: Annotated[Path, typer.Argument(metavar="PLOT.png")],
) -> None:
    """Plot a benchmark's JSON file."""
    from offbeat.benchmarks.harness.plots import draw

    try:
        draw(result, plot)
    except ValueError as error:
        typer.echo(f"offbeat: {error}", err=True)
        raise typer.Exit(1) from None


@runs_app.command("all")
def bench_all(
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="Holds the results; those of this build are not measured again.")
    ] = Path("runs/bench"),
    only: Annotated[str, typer.Option(metavar="LIST", help="Benchmarks, with commas. Default: all but peer.")] = "",
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what is there.")] = False,
    quick: Quick = False,
) -> None:
    """Run every benchmark but `peer`: summary.json, and benchmarks.md with all tables."""
    from offbeat.benchmarks import suite

    try:
        names = suite.parse_names(only)
    except suite.SuiteError as error:
        typer.echo(f"offbeat: {error}", err=True)
        raise typer.Exit(2) from None
    if suite.run(suite.SuiteOptions(folder, names, quick=quick, fresh=fresh)):
        raise typer.Exit(1)
