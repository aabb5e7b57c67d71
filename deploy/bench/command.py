"""`offbeat bench ...`: the command lines of the benchmarks.

Invariant: nothing heavy is imported before a benchmark is asked for, so that `offbeat --help` answers at once.
"""

from pathlib import Path
from typing import Annotated

import typer

bench_app = typer.Typer(help="Measure: medians and ratios from one call, on the real components.", no_args_is_help=True)

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the result there.", show_default=False)
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Seconds instead of minutes: shows that it works, measures little.")
]
