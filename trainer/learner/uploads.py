"""Background uploads of checkpoints (`checkpoint_config`).

Invariants: uploads are in the order of writing, one at a time; a local copy is removed only after the upload was read
back. If the store is slow, waiting checkpoints are skipped, except the newest.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from offbeat.services.errors import FencedError
from offbeat.trainer.config.checkpoints import CheckpointConfig
from offbeat.trainer.learner.reporter import LearnerReporter
from offbeat.trainer.training.checkpoint import PREFIX, Checkpoint, CheckpointError, read_checkpoint
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from offbeat.trainer.training.remote_checkpoints import RemoteFolder, SourceError, StoreError

logger = logging.getLogger(__name__)

MAX_WAITING = 2
"""Checkpoints waiting on the disk, besides the one being uploaded."""
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
FOREGROUND_TIMEOUT_S = 900.0
"""Longest wait of training (`async_upload: false`) and of a finished run."""
STOP_TIMEOUT_S = 15.0
"""Longest wait of a stopped learner, whose host gives it 20 s."""
POLL_S = 0.2


class CheckpointUploads:
    def __init__(
        self,
        config: CheckpointConfig,
        remote: RemoteFolder,
        store: CheckpointStore,
        reporter: LearnerReporter,
        *,
        keep: int,
    ) -> None:
        """keep: newest checkpoints kept in the store, besides the best."""
        self._config = config
        self._remote = remote
        self._store = store
        self._reporter = reporter
        self._keep = keep
        self._changed = threading.Condition()
        self._waiting: deque[Path] = deque()
        self._seconds: list[float] = []
        self._num_failed = self._num_skipped = 0
        self._problem = ""
        self._fenced: FencedError | None = None
        store.pinned = self._pinned
        threading.Thread(target=self._run, name="checkpoint-uploads", daemon=True).start()

    @property
    def newest_url(self) -> str:
        """Return the URL of the newest complete upload, or ""."""
        listed = self._remote.checkpoints
        return f"{self._remote.url}/{listed[-1].name}" if listed else ""

    def add(self, path: Path) -> None:
        """Queue a durable checkpoint."""
        with self._changed:
            if path not in self._waiting:
                self._waiting.append(path)
            while len(self._waiting) > 1 + MAX_WAITING:
                del self._waiting[1]  # the first one is being uploaded
                self._num_skipped += 1
            self._changed.notify_all()

    def after_checkpoint(self, path: Path, should_stop: Callable[[], bool]) -> None:
        """Queue a checkpoint; wait for it with `async_upload: false`."""
        self.add(path)
        if not self._config.async_upload:
            self.wait(FOREGROUND_TIMEOUT_S, should_stop)
        self.report()

    def wait(self, timeout_s: float, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait for all uploads; return False at the time limit or a stop. Raises `FencedError`."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.report()
            with self._changed:
                if not self._waiting:
                    break
                step = int(self._waiting[0].name.removeprefix(PREFIX))
                self._changed.wait(POLL_S)
            if time.monotonic() > deadline or should_stop():
                return False
            self._reporter.set_activity("upload", step=step)
        self.report()  # what ended since the last report
        return True

    def finish(self, timeout_s: float, should_stop: Callable[[], bool]) -> None:
        """Wait for all uploads, after a stop no longer than the host does; raises `FencedError`."""
        if not self.wait(timeout_s, should_stop) and should_stop():
            self.wait(min(timeout_s, STOP_TIMEOUT_S))

    def report(self) -> None:
        """Show progress and problems; raises `FencedError`."""
        with self._changed:
            seconds, self._seconds = self._seconds, []
            failed, self._num_failed = self._num_failed, 0
            skipped, self._num_skipped = self._num_skipped, 0
            problem, fenced = self._problem, self._fenced
        if fenced is not None:
            raise fenced
        self._reporter.record_uploads(seconds, failed, skipped)
        self._reporter.set_problem(problem, "upload")

    def _pinned(self) -> set[str]:
        with self._changed:
            return {path.name for path in self._waiting}

    def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                path = self._waiting[0]
            began = time.monotonic()
            try:
                self._upload(path)
            except FencedError as error:
                with self._changed:
                    self._fenced = error
                return
            except (SourceError, CheckpointError) as error:
                logger.warning("%s is not uploaded: %s", path, error)
                self._done(path, skipped=1)
                continue
            except (StoreError, OSError) as error:
                self._fail(path, error)
                time.sleep(retry_s)
                retry_s = min(2 * retry_s, LONGEST_RETRY_S)
                continue
            retry_s = FIRST_RETRY_S
            self._done(path, seconds=time.monotonic() - began)

    def _upload(self, path: Path) -> None:
        checkpoint = read_checkpoint(path)
        if not self._remote.is_taken:
            try:
                self._remote.take_over()
            except CheckpointError as error:
                raise StoreError(str(error)) from error
        others = [each.local_name for each in self._remote.checkpoints if each.step != checkpoint.state.step]
        retained = others[max(len(others) - self._keep + 1, 0) :]
        removes = not self._config.keep_local_file
        if not self._is_stored(checkpoint):
            if any(each.serial >= checkpoint.state.serial for each in self._remote.checkpoints):
                raise SourceError("a later one is in the store")
            self._remote.upload(checkpoint, retained, read_back=removes, best=lambda: self._store.best)
        self._store.note_elsewhere(self._remote.checkpoints, self._remote.url)
        logger.info("%s is uploaded to %s", path, self.newest_url)
        if removes:
            self._store.release(path.name).result()

    def _is_stored(self, checkpoint: Checkpoint) -> bool:
        state = checkpoint.state
        known = {(each.step, each.lineage, each.serial) for each in self._remote.checkpoints}
        return (state.step, state.lineage, state.serial) in known

    def _done(self, path: Path, *, seconds: float | None = None, skipped: int = 0) -> None:
        with self._changed:
            self._waiting.remove(path)
            self._seconds += [] if seconds is None else [seconds]
            self._num_skipped += skipped
            self._problem = ""
            self._changed.notify_all()

    def _fail(self, path: Path, error: Exception) -> None:
        with self._changed:
            self._num_failed += 1
            self._problem = (
                f"the checkpoint {path.name} could not be uploaded ({error}): check checkpoint_config.output_dir and its "
                "credentials in the environment; the local copy is kept"
            )
        logger.warning("%s", self._problem)
