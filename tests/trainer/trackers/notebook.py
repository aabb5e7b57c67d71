"""A user's tracker that writes JSON lines and fails on demand."""

import json
import time
from pathlib import Path

from offbeat.trainer.trackers.base import (
    Ending,
    Row,
    TrackedRun,
    Tracker,
)


class Notebook(Tracker):
    """Records every call."""

    def __init__(
        self,
        run: TrackedRun,
        *,
        path: Path,
        refuses: str = "",
        down_while: Path | None = None,
        hangs_at: int = 0,
    ) -> None:
        """refuses: raise for rows with this metric. down_while: raise while the file exists. hangs_at: hang at this step."""
        self._path, self._refuses, self._down_while, self._hangs_at = path, refuses, down_while, hangs_at
        self.place = str(path)
        self._note(opened=run.key, resumed=run.resumed, config=dict(run.config))

    def write(self, row: Row) -> None:
        if self._down_while is not None and self._down_while.exists():
            raise ConnectionError("connection refused")
        if self._refuses in row.values:
            raise ValueError(f"unsupported metric: {self._refuses}")
        while row.step == self._hangs_at:
            time.sleep(60.0)
        self._note(number=row.number, step=row.step, values=dict(row.values))

    def close(self, ending: Ending) -> None:
        self._note(closed=ending)

    def _note(self, **fields: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(fields) + "\n")


class NoTracker:
    """Not a tracker."""


class Half(Tracker):
    """A tracker without `write`."""
