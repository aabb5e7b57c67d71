"""Options and run of the commands of `offbeat bench`."""

from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the result there.", show_default=False)
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Seconds instead of minutes: shows that it works, measures little.")
]
Cuda = Annotated[bool, typer.Option("--cuda", help="On the first GPU.")]
DtypeName = Literal["float32", "bfloat16", "float16"]
ModelFolder = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="A Hugging Face folder. Default: the tiny policy.")
]
CoalesceS = Annotated[float, typer.Option(metavar="S", help="Window for batching turns into a call.")]


class Distribution(StrEnum):
    normal = "normal"
    lognormal = "lognormal"


class Size(StrEnum):
    """Parameters of a model."""

    m1 = "1M"
    m16 = "16M"
    m135 = "135M"


class MeshEngine(StrEnum):
    vllm = "vllm"
    hf_infer = "hf_infer"


class Work(StrEnum):
    real = "real"
    emulated = "emulated"


class PlanPart(StrEnum):
    training = "async"
    redundancy = "redundancy"


def run_bench(name: str, bench: Callable[[Any], dict[str, Any]], options: Any, file: Path | None) -> None:
    """Run a benchmark and write its result."""
    from offbeat.benchmarks.harness.result import write_json

    try:
        result = bench(options)
    except KeyboardInterrupt:
        typer.echo("offbeat: interrupted; what was started has ended", err=True)
        raise
    if file is not None:
        write_json(file, name, asdict(options), result)
