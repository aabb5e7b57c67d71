"""Command line of `offbeat bench`.

Invariant: commands import heavy modules.
"""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from offbeat.benchmarks.cli_options import (
    CoalesceS,
    Cuda,
    DtypeName,
    JsonFile,
    MeshEngine,
    ModelFolder,
    Quick,
    Size,
    run_bench,
)
from offbeat.benchmarks.cli_runs import runs_app
from offbeat.deploy.local.signals import raise_interrupt_on_signals

bench_app = typer.Typer(help="Measure: medians and ratios from one call, on the real components.", no_args_is_help=True)
bench_app.add_typer(runs_app)


@bench_app.callback()
def before_each() -> None:
    raise_interrupt_on_signals()


@bench_app.command("buffer")
def bench_buffer(
    tokens: Annotated[
        list[int] | None, typer.Option(min=64, help="Of a trajectory; may be repeated. Default: 256 and 4096.")
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Of 8 groups of 8, in a round.")] = 32,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    reverb: Annotated[bool, typer.Option("--reverb/--no-reverb", help="Compare with Reverb, too.")] = True,
    fsync: Annotated[bool, typer.Option("--fsync", help="Compare with `redis.appendfsync: always`, too.")] = False,
    venv: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Reverb's own, made if absent. Default: in the user's cache.")
    ] = None,
    json: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Measure groups/s of the trajectory buffer, plain redis-py and Reverb."""
    from offbeat.benchmarks.buffer import comparison

    options = comparison.BufferOptions(
        tokens=tuple(tokens or comparison.BufferOptions().tokens),
        batches=batches,
        rounds=rounds,
        reverb=reverb,
        fsync=fsync,
        venv=venv,
    )
    if quick:
        options = comparison.BufferOptions(tokens=(256,), batches=2, rounds=1, reverb=False, fsync=fsync)
    run_bench("buffer", comparison.run, options, json)


@bench_app.command("scale")
def bench_scale(
    concurrency: Annotated[
        list[int] | None, typer.Option(min=8, help="Episodes at a time; may be repeated. Default: 16 to 4096.")
    ] = None,
    answer_s: Annotated[float, typer.Option(metavar="S", help="Of the scripted policy for a turn.")] = 0.0,
    coalesce_s: CoalesceS = 0.0,
    rounds: Annotated[int, typer.Option(min=1, help="Windows of each setting.")] = 5,
    json: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Measure one env worker with a scripted policy: trajectories/s, CPU, memory. For waits as in a run: --answer-s
    0.05 --coalesce-s 0.01.
    """
    from offbeat.benchmarks import scale

    options = scale.ScaleOptions(
        concurrency=tuple(concurrency or scale.ScaleOptions().concurrency),
        answer_s=answer_s,
        coalesce_s=coalesce_s,
        rounds=rounds,
    )
    if quick:
        options = scale.ScaleOptions(concurrency=(16, 64), window_s=1.0, rounds=1)
    run_bench("scale", scale.run, options, json)


@bench_app.command("generation")
def bench_generation(
    model: ModelFolder = None,
    dtype: Annotated[DtypeName, typer.Option(help="Of the engine.")] = "float32",
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at a time; may be repeated. Default: 1 to 256.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 32,
    per_client: Annotated[int, typer.Option(min=1, help="Requests of a client in a round; at least those of 16.")] = 8,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    http: Annotated[bool, typer.Option(help="Also as somebody else's agent calls it, over HTTP.")] = True,
    enforce_eager: Annotated[
        bool | None, typer.Option(help="Without a compiled model and CUDA graphs. Default: on a CPU.")
    ] = None,
    cuda: Cuda = False,
    json: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Compare tokens/s and latency of the generation service and a bare AsyncLLM."""
    from offbeat.benchmarks import generation

    options = generation.GenerationOptions(
        model=model,
        dtype=dtype,
        concurrency=tuple(concurrency or generation.GenerationOptions().concurrency),
        tokens=tokens,
        per_client=per_client,
        rounds=rounds,
        http=http,
        enforce_eager=enforce_eager,
        device="cuda" if cuda else "cpu",
    )
    if quick:
        options = replace(options, concurrency=(1, 8), tokens=8, per_client=2, rounds=1)
    run_bench("generation", generation.run, options, json)


@bench_app.command("turn")
def bench_turn(
    model: ModelFolder = None,
    smollm2: Annotated[bool, typer.Option("--smollm2", help="Random weights of SmolLM2-135M's shape.")] = False,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Episodes at a time; may be repeated. Default: 1 to 1024.")
    ] = None,
    coalesce_s: CoalesceS = 0.0,
    dtype: Annotated[DtypeName, typer.Option(help="Of the engines.")] = "float32",
    sessions: Annotated[bool, typer.Option(help="Keep episodes in the engine between their turns.")] = True,
    engine: Annotated[MeshEngine, typer.Option(help="Of the mesh; the bare one is vLLM.")] = MeshEngine.vllm,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    cuda: Cuda = False,
    json: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Measure a turn's CPU and wall time by part, and bare AsyncLLM, the forward pass and the env alone."""
    from offbeat.benchmarks.turn import bench

    options = bench.TurnOptions(
        model=model,
        smollm2=smollm2,
        concurrency=tuple(concurrency or bench.TurnOptions().concurrency),
        coalesce_s=coalesce_s,
        dtype=dtype,
        sessions=sessions,
        engine=engine.value,
        rounds=rounds,
        device="cuda" if cuda else "cpu",
    )
    if quick:
        options = replace(options, concurrency=(1, 16), window_s=1.0, idle_s=1.0, rounds=1)
    run_bench("turn", bench.run, options, json)


@bench_app.command("learner")
def bench_learner(
    model: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A Hugging Face folder. Default: one of --size, made.")
    ] = None,
    size: Annotated[Size, typer.Option(help="Parameters of the model that is made.")] = Size.m1,
    sequences: Annotated[int, typer.Option(min=4, help="Of a batch; a multiple of 4.")] = 32,
    longest: Annotated[int, typer.Option(min=32, help="Tokens of the longest sequence.")] = 256,
    budget: Annotated[int, typer.Option(min=64, help="Tokens of one forward and backward pass.")] = 2048,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps that are measured.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="torch's, on a CPU.")] = 1,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of forward and backward.")] = "float32",
    cuda: Cuda = False,
    json: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Compare tokens/s and peak memory of an optimizer step with bare transformers and TRL."""
    from offbeat.benchmarks import learner
    from offbeat.benchmarks.harness.pace import PacedSideError

    options = learner.LearnerOptions(
        model=model, size=size.value, sequences=sequences, longest=longest, budget=budget, steps=steps, threads=threads,
        device="cuda" if cuda else "cpu", dtype=dtype,
    )  # fmt: skip
    if quick:
        options = replace(options, sequences=8, longest=64, budget=256, steps=2, vocabulary=256)
    try:
        if complaint := learner.check(options):
            raise PacedSideError(complaint)
        run_bench("learner", learner.run, options, json)
    except PacedSideError as error:
        typer.echo(f"offbeat: {error}", err=True)
        raise typer.Exit(2) from None


@bench_app.command("trees")
def bench_trees(
    size: Annotated[Size, typer.Option(help="Parameters of the model.")] = Size.m1,
    groups: Annotated[int, typer.Option(min=1, help="Of a batch.")] = 4,
    group_size: Annotated[int, typer.Option(min=1, help="Episodes of a group.")] = 8,
    budget: Annotated[int, typer.Option(min=64, help="Tokens of one forward and backward pass.")] = 4096,
    rounds: Annotated[int, typer.Option(min=1, help="Batches of each side that are measured.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="torch's.")] = 1,
    dtype: Annotated[DtypeName, typer.Option(help="Of the passes that are timed.")] = "float32",
    cuda: Cuda = False,
    json: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Compare passes over prefix trees with passes over separate sequences."""
    from offbeat.benchmarks import trees

    device: Literal["cpu", "cuda"] = "cuda" if cuda else "cpu"
    options = trees.TreeOptions(size.value, groups, group_size, budget, rounds, threads, device, dtype)
    run_bench("trees", trees.run, replace(options, groups=1, group_size=4, rounds=1) if quick else options, json)


@bench_app.command("tenants")
def bench_tenants(
    tenants: Annotated[
        list[int] | None, typer.Option(min=1, help="LoRA models at a time; may be repeated. Default: 1, 2, 4 and 8.")
    ] = None,
    size: Annotated[Size, typer.Option(help="Parameters of the base model.")] = Size.m1,
    steps: Annotated[int, typer.Option(min=1, help="Of each tenant.")] = 5,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 8,
    samples: Annotated[int, typer.Option(min=1, help="Answers that a tenant samples in a step.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Of both sides.")] = 3,
    json: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Compare LoRA tenants of Tinker's API together with the same runs one after the other."""
    from offbeat.benchmarks.tinker import tenants as bench

    if find_spec("tinker") is None:
        typer.echo("offbeat: bench tenants needs Tinker's SDK: pip install 'offbeat[tinker]'", err=True)
        raise typer.Exit(2)
    options = bench.TenantsOptions(
        size=size.value,
        tenants=tuple(tenants or bench.TenantsOptions().tenants),
        steps=steps,
        batch=batch,
        samples=samples,
        rounds=rounds,
    )
    if quick:
        options = replace(options, tenants=(1, 2), steps=2, batch=2, samples=2, answer=4, tokens=16, rounds=1)
    run_bench("tenants", bench.run, options, json)


@bench_app.command("weights")
def bench_weights(
    size: Annotated[
        list[Size] | None, typer.Option(help="Parameters of the model; may be repeated. Default: all.")
    ] = None,
    replicas: Annotated[
        list[int] | None, typer.Option(min=1, help="Replicas; may be repeated. Default: 1 and 2.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Versions of each setting.")] = 5,
    running: Annotated[int, typer.Option(min=1, help="Requests that run in each replica.")] = 8,
    dtype: Annotated[DtypeName, typer.Option(help="Of the weights.")] = "bfloat16",
    json: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Measure time from publish to served, replicas' pauses, and bytes/s."""
    from offbeat.benchmarks import weights
    from offbeat.benchmarks.weight_deltas import DeltaOptions

    options = weights.WeightOptions(
        sizes=tuple(member.value for member in size or Size),
        replicas=tuple(replicas or (1, 2)),
        rounds=rounds,
        running=running,
        dtype=dtype,
    )
    if quick:
        deltas = DeltaOptions(learning_rates=(1e-6,), steps=3)
        options = replace(options, sizes=("1M",), replicas=(1,), rounds=2, deltas=deltas)
    run_bench("weights", weights.run, options, json)


@bench_app.command("console")
def bench_console(
    steps: Annotated[int, typer.Option(min=32, help="Of the made run, of 10 trajectories each.")] = 10_000,
    tokens: Annotated[int, typer.Option(min=64, help="Of a trajectory.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Of each call.")] = 10,
    watch: Annotated[int, typer.Option(metavar="S", min=1, help="Seconds in which a view's cost is measured.")] = 15,
    json: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Measure the console on a long run: REST calls, the page in Chromium, and what it costs the run."""
    from offbeat.benchmarks.console import bench

    options = bench.ConsoleOptions(steps=steps, tokens=tokens, rounds=rounds, watch_s=watch)
    if quick:
        options = replace(options, steps=64, rounds=1, watch_s=1)
    run_bench("console", bench.run, options, json)
