"""`offbeat export RUN_OR_CHECKPOINT -o OUT`."""

from pathlib import Path

from offbeat.deploy.model_export import Dtype, Echo, ExportError, export_adapter, export_merged

RUNS = Path("runs")


def export_run(run: str, out: Path, *, adapter: bool, dtype: Dtype | None, echo: Echo) -> None:
    """Export a checkpoint, or a run's newest; raises `ExportError`."""
    source = next((path for path in (Path(run), RUNS / run) if path.is_dir()), None)
    if source is None:
        raise ExportError(f"there is no folder {run} or {RUNS / run}: name a run or a checkpoint")
    if not adapter:
        export_merged(source, out, dtype, echo)
    elif dtype is None:
        export_adapter(source, out, echo)
    else:
        raise ExportError("--dtype is of merged weights: leave it out, or --adapter")
