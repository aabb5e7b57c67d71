"""A tracker of one's own, as a user would write it: a file of JSON lines, that fails where it is told to."""

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
    """Writes down all that it hears."""

    def __init__(
        self,
        run: TrackedRun,
        *,
        path: Path,
        refuses: str = "",
        down_while: Path | None = None,
        hangs_at: int = 0,
    ) -> None:
        """refuses: rows with this metric. down_while: takes nothing while the file is there. hangs_at: step at which it
        never comes back."""
        self._path, self._refuses, self._down_while, self._hangs_at = path, refuses, down_while, hangs_at
        self.place = str(path)
        self._note(opened=run.key, resumed=run.resumed, config=dict(run.config))

    def write(self, row: Row) -> None:
        if self._down_while is not None and self._down_while.exists():
            raise ConnectionError("nobody answers")
        if self._refuses in row.values:
            raise ValueError(f"no place for {self._refuses}")
        while row.step == self._hangs_at:
            time.sleep(60.0)
        self._note(number=row.number, step=row.step, values=dict(row.values))

    def close(self, ending: Ending) -> None:
        self._note(closed=ending)

    def _note(self, **what: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(what) + "\n")


class NoTracker:
    """Takes nothing."""


class Half(Tracker):
    """Does not say what it does with a row."""
