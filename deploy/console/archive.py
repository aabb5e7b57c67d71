"""`RunArchive` of a folder."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offbeat.deploy import run_folder
from offbeat.deploy.audit.lives import DROPPED, FAILED, TRAINED, GroupLife
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import read_run
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.console.cached_file import CachedFile
from offbeat.deploy.console.frames import EpisodeToReplay, render_frames
from offbeat.deploy.console.groups import GroupIndex, count_lags, count_lives, page_of, select, view_of
from offbeat.deploy.console.ledger_counts import LedgerCounts
from offbeat.deploy.console.series import SeriesIndex
from offbeat.deploy.console.trajectories import RecordedTrajectories
from offbeat.deploy.run_setup import model_folder
from offbeat.services.control.console.archive import GroupQuery, NotRecordedError
from offbeat.services.control.console.schemas import (
    Axis,
    FramesView,
    GroupDetailView,
    GroupsView,
    GroupView,
    LagsView,
    SeriesView,
    TrajectoryView,
)
from offbeat.services.control.schemas import CountersView
from offbeat.services.rollout.tasks import train_task
from offbeat.trainer.trackers.supervisor import without_secrets
from offbeat.trainer.training.checkpoint import PREFIX, CheckpointError, read_checkpoint, read_uploaded

PRIVATE = ("control", "redis", "system_envs", "tracker_kwargs", "weights.url")
"""May hold passwords, or irrelevant to training."""
READ_S = 2.0
"""Time of reading metrics in a call, which other calls wait for."""


class FolderArchive:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._groups = GroupIndex(folder)
        self._counts = LedgerCounts(folder)
        self._series = SeriesIndex(folder)
        self._trajectories = RecordedTrajectories(folder, lambda: self._model_folder)
        self._config = CachedFile(folder / run_folder.CONFIG, self._read_config)
        self._lock = threading.Lock()
        """Of groups and trajectories."""
        self._series_lock = threading.Lock()
        self._rendering = threading.Lock()

    @property
    def run_config(self) -> RunConfig:
        """Raises `NotRecordedError`."""
        return self._config.get()

    def _read_config(self) -> RunConfig:
        path = self.folder / run_folder.CONFIG
        try:
            return read_run(path).model_copy(update={"output_dir": self.folder})
        except (ConfigError, OSError) as error:
            raise NotRecordedError(f"{path} can't be read: {error}") from error

    @property
    def _model_folder(self) -> Path:
        return model_folder(self.run_config)

    def groups(self, query: GroupQuery) -> GroupsView:
        with self._lock:
            self._refresh()
            ratios = self._trajectories.max_ratios()
            lives = select(self._groups.lives.values(), query, self._tag_of, ratios)
            return page_of(lives, query, lambda life: self._view(life, ratios))

    def lags(self, groups: int, columns: int) -> LagsView:
        with self._lock:
            self._refresh()
            return count_lags(self._groups.lives, groups, columns)

    def group(self, number: int) -> GroupDetailView:
        with self._lock:
            self._refresh()
            life = self._groups.find(number)
            view = self._view(life, self._trajectories.max_ratios())
            members = self._trajectories.members(life.step, number) if view.recorded and life.step else []
            return GroupDetailView(**view.model_dump(), members=members)

    def trajectory(self, number: int, index: int) -> TrajectoryView:
        with self._lock:
            self._refresh()
            return self._trajectories.view(self._kept_step(number), number, index)

    def frames(self, number: int, index: int) -> FramesView:
        with self._lock:
            self._refresh()
            step = self._kept_step(number)
            trajectory, answers = self._trajectories.episode(step, number, index)
        env = self.run_config.custom_envs.get(trajectory.tag)
        if env is None:
            raise NotRecordedError(f"the run has no env {trajectory.tag!r} to play the episode again")
        digests = [turn.state_hash for turn in trajectory.turns]
        with self._rendering:
            return render_frames(EpisodeToReplay(env, trajectory.seed, answers, digests))

    def _kept_step(self, number: int) -> int:
        """Return the step that keeps a group's trajectories; raises `UnknownGroupError`, `NotRecordedError`."""
        life = self._groups.find(number)
        if life.step is None:
            raise NotRecordedError(f"group {number} is not trained: trajectories are kept with their step's batch")
        if not life.computed:
            raise NotRecordedError(
                f"group {number} was masked at step {life.step}: only trajectories that were computed on are kept"
            )
        if life.step not in self._trajectories.steps:
            raise NotRecordedError(
                f"the trajectories of step {life.step} are not kept: console.keep_steps sets how many steps are, and "
                f"the kept ones are {_describe_range(sorted(self._trajectories.steps))}"
            )
        return life.step

    def series(self, names: Sequence[str], axis: Axis, since: float | None, points: int) -> SeriesView:
        with self._series_lock:
            self._series.refresh(READ_S)
            return self._series.view(names, axis, since, points)

    def config(self) -> Mapping[str, Any]:
        tree = without_secrets(self.run_config.model_dump(mode="json"))
        return {key: value for key, value in _flatten(tree) if not _is_private(key)}

    def lives(self) -> list[GroupLife]:
        """Return the newest groups' lives, admitted first."""
        with self._lock:
            self._refresh()
            return list(self._groups.lives.values())

    def counters(self) -> CountersView:
        """Count all groups."""
        lives = self.lives()
        if self._groups.has_all:
            return count_lives(lives)
        with self._lock:
            self._counts.refresh()
            num_of, reasons = self._counts.num_of, self._counts.reasons
            return CountersView(
                admitted=num_of["admitted"],
                submitted=num_of["submitted"],
                trained=num_of[TRAINED],
                dropped=dict(reasons[DROPPED]),
                failed=dict(reasons[FAILED]),
                in_flight=num_of["admitted"] - self._counts.num_ended,
            )

    def latest(self) -> dict[str, float | None]:
        while (view := self.series([], "step", None, 1)).unread_bytes:
            continue
        return view.last

    def _refresh(self) -> None:
        self._groups.refresh()
        self._trajectories.refresh()

    def _view(self, life: GroupLife, ratios: Mapping[int, float]) -> GroupView:
        recorded = life.computed and life.step in self._trajectories.steps
        return view_of(life, tag=self._tag_of(life), max_ratio=ratios.get(life.number), recorded=recorded)

    def _tag_of(self, life: GroupLife) -> str:
        if life.tag:
            return life.tag
        try:
            config = self.run_config
            if config.train_env_manager.task_sampler is not None or config.reads_data or config.plays_prompts:
                return ""  # drawn, or of the row
            return train_task(config, config.seed, life.number).tag
        except NotRecordedError:
            return ""


def find_checkpoint(folder: Path, step: int) -> str:
    """Return the path of a complete checkpoint, or the URL of its copy in the run's store; raises `NotRecordedError`."""
    checkpoints = folder / "checkpoints"
    path = checkpoints / f"{PREFIX}{step:06d}"
    url, uploaded = read_uploaded(checkpoints)
    copies = {each.step: f"{url}/{each.name}" for each in uploaded}
    try:
        if path.is_dir():
            return str(read_checkpoint(path).path)
    except CheckpointError as error:
        if step not in copies:
            raise NotRecordedError(f"{path} can't be used: {error}") from error
    if step in copies:
        return copies[step]
    names = {*(each.name for each in checkpoints.glob(f"{PREFIX}*")), *(each.local_name for each in uploaded)}
    raise NotRecordedError(
        f"there is no checkpoint of step {step} in {' or '.join([str(checkpoints), *([url] if url else [])])}: "
        f"{', '.join(sorted(names)) or 'none at all'}"
    )


def _describe_range(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]}" if steps else "none"


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        flat += _flatten(value, f"{key}.") if isinstance(value, dict) and value else [(key, value)]
    return flat


def _is_private(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in PRIVATE)
