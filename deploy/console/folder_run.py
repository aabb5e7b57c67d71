"""View of a run from its folder."""

from pathlib import Path

from offbeat.deploy import run_folder
from offbeat.deploy.console.archive import FolderArchive
from offbeat.deploy.report.report import read_report
from offbeat.services.control.run import DesiredState, RunState
from offbeat.services.control.schemas import (
    FindingView,
    PathsView,
    RunView,
    SettingsView,
    StalenessView,
)

PREFIX = "learner/"


def view_folder(archive: FolderArchive) -> RunView:
    """Raises `NotRecordedError` without a configuration."""
    config, folder = archive.run_config, archive.folder
    report = read_report(folder)
    last = archive.latest()
    metrics = {name.removeprefix(PREFIX): value for name, value in last.items() if name.startswith(PREFIX)}
    lives = archive.lives()
    step = max((life.step for life in lives if life.step is not None), default=-1)
    reported_at = float(report.get("ended_at") or (folder / run_folder.CONFIG).stat().st_mtime)
    began_at = reported_at - float(report.get("wall_s") or 0.0)
    # A killed run has no report, or that of an earlier start
    times = (max(life.admitted_at, life.submitted_at, life.trained_at, life.ended_at) for life in lives)
    ended_at = max(reported_at, max(times, default=0.0))
    finished, active = step >= config.max_steps, run_folder.find_holder(folder) is not None
    url = live_url(folder) if active else None
    state = RunState.RUNNING if active else RunState.FINISHED if finished else RunState.STOPPED
    return RunView(
        id=config.exp_name,
        state=state,
        wanted=DesiredState.RUNNING if active or finished else DesiredState.STOPPED,
        phase=f"active: see {url}/ui" if url else "",
        error="",
        log="",
        resumable=not finished and not active,
        step=step,
        version=step,
        max_steps=config.max_steps,
        attempt=int(report.get("attempts") or 1),
        created_at=began_at,
        started_at=began_at,
        running_at=began_at,
        ended_at=0.0 if active else ended_at,
        counters=archive.counters(),
        staleness=StalenessView(
            mean=metrics.get("staleness"), max=metrics.get("staleness_max"), bound=config.max_staleness
        ),
        settings=SettingsView.of(config.settings),
        metrics=metrics,
        diagnosis=[FindingView.model_validate(finding) for finding in report.get("diagnosis", [])],
        paths=PathsView(
            output_dir=str(folder),
            logs=str(folder / "logs"),
            checkpoints=str(folder / "checkpoints"),
            tensorboard=str(folder / "tensorboard"),
        ),
    )


def live_url(folder: Path) -> str | None:
    """Return the address of the folder's control service, if any."""
    endpoints = run_folder.read_endpoints(folder)
    return endpoints.control_url if endpoints else None


def find_folders(root: Path) -> list[Path]:
    """Return the run folders at or in a folder, newest first."""
    folders = [root, *sorted(path for path in root.iterdir() if path.is_dir())] if root.is_dir() else []
    runs = [folder.resolve() for folder in folders if (folder / run_folder.CONFIG).is_file()]
    return sorted(runs, key=lambda folder: -(folder / run_folder.CONFIG).stat().st_mtime)
