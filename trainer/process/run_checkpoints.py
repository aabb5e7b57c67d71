"""A run's checkpoints, local and in its store, at the start of a learner."""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from offbeat.services.durable_files import FULL_DISK
from offbeat.services.errors import ControlError
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.learner.checkpointing import RETRY_INTERVAL_S
from offbeat.trainer.learner.reporter import LearnerReporter
from offbeat.trainer.learner.uploads import CheckpointUploads
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.checkpoint import Checkpoint, RemoteCheckpoint, read_checkpoint, read_uploaded
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from offbeat.trainer.training.remote_checkpoints import RemoteFolder, StoreError, fetch_by_url

logger = logging.getLogger(__name__)

T = TypeVar("T")

STORE_TIMEOUT_S = 60.0
"""Longest wait for a store at the start; then a restart if the checkpoint is there, else training without it."""


class StoppedError(Exception):
    """The learner should stop while it waits for room."""


def wait_for_room(
    write: Callable[[], T], folder: Path, reporter: LearnerReporter, should_stop: Callable[[], bool]
) -> T:
    """Repeat a write in `folder` until its disk has room.

    Raises:
        StoppedError: the learner should stop before.
    """
    is_waiting = False
    while True:
        try:
            result = write()
            if is_waiting:
                reporter.set_problem("")
            return result
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            is_waiting = True
            if should_stop():
                raise StoppedError from error
            reporter.set_problem(f"{folder} can't be written ({error})")
            reporter.set_activity("no_room", step=0)
            time.sleep(RETRY_INTERVAL_S)


def check_processes(config: LearnerConfig, checkpoint: Checkpoint, num_processes: int, num_critics: int) -> None:
    """Raise `ControlError` if the optimizers of a checkpoint are sharded over another number of processes.

    num_critics: processes of the critic's own, or 0.
    """
    state, train = checkpoint.state, config.actor_train
    if train.is_sharded(train.model_args) and state.num_processes != num_processes:
        raise ControlError(
            f"{checkpoint.path} was written by {state.num_processes} process(es), and its optimizer shards can't be "
            f"redistributed to {num_processes}: use {state.num_processes} (--nproc or actor_train.num_processes)"
        )
    written_by = state.num_critic_processes or state.num_processes
    number = num_critics or num_processes
    critic_is_sharded = config.has_own_critic and train.is_sharded(train.model_args.of_role(config.critic.model_args))
    if critic_is_sharded and written_by != number:
        raise ControlError(
            f"the critic in {checkpoint.path} was written by {written_by} process(es), and its optimizer shards can't "
            f"be redistributed to {number}: set critic.num_processes to {written_by}"
        )


class RunCheckpoints:
    def __init__(self, run: LearnerRun, epoch: int, reporter: LearnerReporter, should_stop: Callable[[], bool]) -> None:
        """Take over the local folder once the disk has room; raises `FencedError` and `StoppedError`."""
        self._run = run
        self._reporter = reporter
        self._should_stop = should_stop
        self._uploaded = read_uploaded(run.checkpoints)
        open_store = partial(CheckpointStore, run.checkpoints, run.config.max_ckpt_to_keep, epoch)
        self.local = wait_for_room(open_store, run.checkpoints, reporter, should_stop)
        self._remote = RemoteFolder(run.store_url, epoch) if run.store_url else None

    def find(self) -> Checkpoint | None:
        """Return the run's newest checkpoint (of any lineage with `true`), else the configured one, downloaded if
        needed.

        Raises:
            CheckpointError: the configured one is unusable.
            ControlError: the store refuses access.
            StoreError: the store with the checkpoint is down.
        """
        requested = self._run.config.resume_from_checkpoint
        lineage = None if requested is True else self._run.lineage
        newest = self._newer_in_store(self.local.newest_complete(lineage), lineage)
        if newest is None and isinstance(requested, str):
            newest = self._patiently(lambda: fetch_by_url(requested, self._run.restored))
        elif newest is None and isinstance(requested, Path):
            newest = read_checkpoint(requested)
        if newest is not None:
            self.local.continue_after(newest.state.serial)
        return newest

    def _newer_in_store(self, local: Checkpoint | None, lineage: str | None) -> Checkpoint | None:
        """Return the newer of `local` and the store's; ask the store only if it may have a newer one."""

        def is_newer(each: RemoteCheckpoint) -> bool:
            if lineage not in (None, each.lineage):
                return False
            return local is None or (each.serial, each.step) > (local.state.serial, local.state.step)

        url, noted = self._uploaded
        expected = any(map(is_newer, noted))
        if not expected and (local is not None or self._remote is None):
            return local
        # A resumed run may have another id than the one that wrote the folder
        remotes = [
            each for each in (self._remote, RemoteFolder(url) if url and url != self._run.store_url else None) if each
        ]
        for remote in remotes:
            try:
                self._patiently(remote.take_over if remote is self._remote else remote.read_list)
            except StoreError as error:
                if expected:
                    raise
                self._reporter.set_problem(
                    f"checkpoint_config.output_dir: {error}; training begins without it", "upload"
                )
                continue
            for each in reversed(remote.read_list()):
                if is_newer(each):
                    self._reporter.set_phase(f"downloading {remote.url}/{each.name}")
                    return self._patiently(partial(remote.fetch, each.name, self._run.restored))
        return local

    def _patiently(self, access: Callable[[], T]) -> T:
        """Retry while the store is down, up to `STORE_TIMEOUT_S`."""
        deadline = time.monotonic() + STORE_TIMEOUT_S
        while True:
            try:
                return access()
            except StoreError as error:
                if isinstance(error.__cause__, PermissionError | FileNotFoundError):
                    raise ControlError(
                        f"{error}: check checkpoint_config.output_dir, and the credentials in the environment"
                    ) from error
                if time.monotonic() > deadline or self._should_stop():
                    raise
                logger.warning("%s; trying again", error)
                self._reporter.set_activity("store", step=0)
                time.sleep(1.0)

    def start_uploads(self) -> CheckpointUploads | None:
        """Start uploading, including what earlier learners left."""
        store = self._run.config.checkpoint_config
        if store is None or self._remote is None:
            return None
        keep = self._run.config.max_ckpt_to_keep
        uploads = CheckpointUploads(store, self._remote, self.local, self._reporter, keep=keep)
        for path in self.local.paths:
            uploads.add(path)
        return uploads
