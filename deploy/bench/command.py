"""`offbeat bench ...`: the command lines of the benchmarks.

Invariant: nothing heavy is imported before a benchmark is asked for, so that `offbeat --help` answers at once.
"""

from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

bench_app = typer.Typer(help="Measure: medians and ratios from one call, on the real components.", no_args_is_help=True)

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the result there.", show_default=False)
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Seconds instead of minutes: shows that it works, measures little.")
]


class Distribution(StrEnum):
    """Of a latency."""

    normal = "normal"
    lognormal = "lognormal"


class Work(StrEnum):
    """What `offbeat bench async` trains and samples with."""

    real = "real"
    emulated = "emulated"


@bench_app.command("async")
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
    steps: Annotated[int, typer.Option(min=3, help="Batches of each run.")] = 12,
    batch: Annotated[int, typer.Option(min=1, help="Trajectories of a batch.")] = 64,
    env_groups: Annotated[int, typer.Option(min=1, help="Groups of 8 in play.")] = 16,
    train_s: Annotated[float, typer.Option(metavar="S", help="Of a batch, with --work emulated.")] = 0.5,
    answer_s: Annotated[float, typer.Option(metavar="S", help="Of a turn, with --work emulated.")] = 0.02,
    json: JsonFile = None,
    quick: Quick = False,
) -> None:
    """The same work synchronously and asynchronously, against the ideal: the slower of both sides alone."""
    from deploy.bench import asynchrony

    options = asynchrony.Options(
        work=work.value,
        distributions=tuple(each.value for each in distribution or Distribution),
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
        options = asynchrony.Options(
            work="emulated", distributions=("lognormal",), mean_s=0.01, std_s=0.02, staleness=(1.0,),
            steps=4, batch=16, env_groups=4, train_s=0.05, answer_s=0.002,
        )  # fmt: skip
    _run("async", asynchrony.run, options, json)


def _run(name: str, bench: Callable[[Any], dict[str, Any]], options: Any, file: Path | None) -> None:
    """Run a benchmark and keep its result."""
    from deploy.bench.outcome import write_json

    result = bench(options)
    if file is not None:
        write_json(file, name, asdict(options), result)
