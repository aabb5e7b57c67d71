"""`offbeat track`.

Invariant: only the tracker's position, shared with the run's process, is written.
"""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import Progress as Bar

from offbeat.deploy.cli.audit import AuditError, find_folder
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import read_run
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.yaml_limits import load_yaml
from offbeat.deploy.run_folder import CONFIG
from offbeat.trainer.checks.trackers import check_trackers
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.trackers.base import LoggedSteps, TrackedRun
from offbeat.trainer.trackers.cursor import (
    DeliveryCursor,
    progress_file,
    read_progress,
    tracker_folder,
    write_progress,
)
from offbeat.trainer.trackers.delivery import Delivery, TrackerDownError
from offbeat.trainer.trackers.metrics_file import METRICS_FILE
from offbeat.trainer.trackers.registry import IN_LEARNER, arguments, find_tracker
from offbeat.trainer.trackers.supervisor import without_secrets


class TrackError(Exception):
    """Unavailable tracker, run or metrics."""


def track_run(run: str, name: str, settings: Sequence[str] = (), *, console: Console) -> None:
    """Send unacknowledged metrics. settings: `key=value`, overriding `tracker_kwargs`.

    Raises:
        TrackError: no such run, metrics being sent, or tracker unavailable.
    """
    try:
        folder = find_folder(run)
        config = read_run(folder / CONFIG)
    except (AuditError, ConfigError) as error:
        raise TrackError(str(error)) from error
    metrics = folder / METRICS_FILE
    if not metrics.is_file():
        raise TrackError(f"{folder} has no {METRICS_FILE}: its learner has measured nothing yet")
    kwargs = _tracker_kwargs(config, name, settings)
    cursor_file = progress_file(folder, name)
    with _lock_cursor(cursor_file, name):
        progress = read_progress(cursor_file)
        if progress.offset >= metrics.stat().st_size:
            console.print(_describe_result(name, progress, "had"), markup=False)
            return
        resumed = progress.open(progress.lineage, keep_key=True)
        place = tracker_folder(folder, name)
        place.mkdir(parents=True, exist_ok=True)
        shown = without_secrets(
            config.model_dump(mode="json", include=set(LearnerConfig.model_fields), exclude={"tracker_kwargs"})
        )
        kind = find_tracker(name)
        try:
            tracker = kind(
                TrackedRun(config.exp_name, progress.key, resumed, progress.step, place, shown),
                **arguments(kind, kwargs),
            )
            write_progress(cursor_file, progress)
            logged = LoggedSteps(config.logging_steps, config.max_steps)
            _deliver(Delivery(metrics, cursor_file, progress, tracker, logged), metrics, console)
            tracker.close("finished" if progress.step >= config.max_steps else "stopped")
        except TrackerDownError as error:
            raise TrackError(f"{name} takes nothing: {error}; what it has taken is not sent again") from error
        except Exception as error:
            raise TrackError(f"{name} failed: {type(error).__name__}: {error}") from error
        progress.place = tracker.place or progress.place
        write_progress(cursor_file, progress)
    console.print(_describe_result(name, progress, "has"), markup=False)


def _tracker_kwargs(config: RunConfig, name: str, settings: Sequence[str]) -> dict[str, Any]:
    if name in IN_LEARNER:
        raise TrackError(f"{name} is written by the learner itself, while it runs: name a tracker that is sent to")
    kwargs: dict[str, Any] = dict(config.tracker_kwargs.get(name, {}))
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise TrackError(f"{setting!r} is no KEY=VALUE")
        try:
            kwargs[key] = load_yaml(value)
        except yaml.YAMLError as error:
            raise TrackError(f"{setting!r}: its value is no YAML: {error}") from error
    issues = list(check_trackers(config.model_copy(update={"track_with": (name,), "tracker_kwargs": {name: kwargs}})))
    if issues:
        raise TrackError("; ".join(str(issue) for issue in issues))
    return kwargs


@contextmanager
def _lock_cursor(cursor_file: Path, name: str) -> Iterator[None]:
    """Raises TrackError if locked, or not writable."""
    try:
        cursor_file.parent.mkdir(parents=True, exist_ok=True)
        lock = cursor_file.with_suffix(".lock").open("w")
    except OSError as error:
        raise TrackError(f"the tracker's position can't be written: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrackError(f"{name} is being sent this run's metrics: by its learner, or by another call") from None
        yield


def _deliver(delivery: Delivery, metrics: Path, console: Console) -> None:
    size = metrics.stat().st_size
    with Bar(console=console, transient=True) as bar:
        sending = bar.add_task("sending", total=size, completed=delivery.progress.offset)
        while delivery.round():
            bar.update(sending, completed=min(delivery.progress.offset, size))


def _describe_result(name: str, progress: DeliveryCursor, verb: str) -> str:
    refused = f"; it has refused {progress.refused}" if progress.refused else ""
    return f"{name} {verb} all {progress.number} lines{refused}{f': {progress.place}' if progress.place else ''}"
