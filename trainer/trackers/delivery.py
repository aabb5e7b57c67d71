"""Hands the lines of a run's `metrics.jsonl` to one tracker, in order, from where its last life came to.

Invariants: a line is done when the tracker has taken it, or has refused it and taken one behind it; a tracker that takes
nothing loses nothing, because the place in the file stays; no step and no evaluation is sent a second time.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from offbeat.trainer.trackers.base import Row, Tracker, row_of
from offbeat.trainer.trackers.cursor import Progress, write_progress
from offbeat.trainer.trackers.metrics_file import Line, read_lines

DOWN = 3
"""Rows one after the other that a tracker refuses when it is not for what they hold."""
LINES_PER_ROUND = 500


class DownError(Exception):
    """The tracker takes nothing now."""


class Delivery:
    """One life of one tracker."""

    def __init__(self, metrics: Path, kept: Path, progress: Progress, tracker: Tracker) -> None:
        """metrics, kept: the files of the run and of the progress."""
        self._metrics = metrics
        self._kept = kept
        self.progress = progress
        self._tracker = tracker
        self.busy_since: float | None = None
        """Monotonic time at which the tracker was called, while it has not come back."""

    def round(self) -> int:
        """Hand over what is there, up to a limit; returns how many lines are done.

        Raises:
            DownError: the tracker takes nothing, or could not flush; what it has not taken is not done.
        """
        before = self.progress.number
        try:
            self._hand_over()
        finally:
            if self.progress.number > before:
                self._flush()
                write_progress(self._kept, self.progress)
        return self.progress.number - before

    def _hand_over(self) -> None:
        began, refused = self.progress.number, 0
        waiting: list[Line] = []
        error: Exception | None = None
        for line in read_lines(self._metrics, began, self.progress.offset):
            waiting.append(line)
            row = self._row(line)
            if row is not None:
                error = self._refusal(row)
                refused += error is not None
            if refused and (row is None or error is not None):
                if refused == DOWN:
                    break
                continue
            self.progress.refused += refused
            refused = 0
            self._done(waiting)
            waiting = []
            if line.number - began >= LINES_PER_ROUND:
                return
        if refused:
            raise DownError(_words(error)) from error

    def _row(self, line: Line) -> Row | None:
        """What the tracker is to hear of a line."""
        record = line.record
        if record is None or self.progress.knows(record):
            return None
        told = {key: record[key] for key in ("time", "source", "step", "labels", "values")}
        row = row_of(line.number, self.progress.step, **told)
        return row if row.values else None

    def _refusal(self, row: Row) -> Exception | None:
        self.busy_since = time.monotonic()
        try:
            self._tracker.write(row)
        except Exception as error:
            return error
        finally:
            self.busy_since = None
        return None

    def _done(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self.progress.repeated += line.record is not None and self.progress.knows(line.record)
            self.progress.done(line.number, line.end, line.record)

    def _flush(self) -> None:
        self.busy_since = time.monotonic()
        try:
            self._tracker.flush()
        except Exception as error:
            raise DownError(_words(error)) from error
        finally:
            self.busy_since = None


def _words(error: Exception | None) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
