"""Delivery of `metrics.jsonl` to a tracker, in order, from the stored position.

Invariants: the position passes a line once accepted, or refused before a later accepted one; an outage of the tracker
loses nothing; no step or evaluation is sent twice, and none of weights that the file says are given up.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from offbeat.services.telemetry import REWOUND_TO
from offbeat.services.text_samples import TextSample, sample_from_row
from offbeat.trainer.trackers.base import LoggedSteps, Row, Tracker, make_row
from offbeat.trainer.trackers.cursor import DeliveryCursor, write_progress
from offbeat.trainer.trackers.metrics_file import Line, read_lines

MAX_CONSECUTIVE_REFUSALS = 3
"""Refusals that indicate an outage."""
LINES_PER_ROUND = 500


class TrackerDownError(Exception):
    """The tracker accepts no rows."""


class Delivery:
    def __init__(
        self,
        metrics_path: Path,
        progress_path: Path,
        progress: DeliveryCursor,
        tracker: Tracker,
        logged: LoggedSteps | None = None,
    ) -> None:
        """logged: steps to send; None: all."""
        self._logged = logged or LoggedSteps()
        self._metrics_path = metrics_path
        self._progress_path = progress_path
        self.progress = progress
        self._tracker = tracker
        self._rewinds = list(_find_rewinds(read_lines(metrics_path, progress.number, progress.offset)))
        self.busy_since: float | None = None
        """Monotonic start of the tracker's pending call."""

    def round(self) -> int:
        """Send about `LINES_PER_ROUND` lines; return the number processed.

        Raises:
            TrackerDownError: none are accepted or flushed; they stay unprocessed.
        """
        before = self.progress.number
        try:
            self._send()
        finally:
            if self.progress.number > before:
                self._flush()
                write_progress(self._progress_path, self.progress)
        return self.progress.number - before

    def _send(self) -> None:
        start, refused = self.progress.number, 0
        pending: list[Line] = []
        error: Exception | None = None
        for line in self._read(start):
            pending.append(line)
            row = self._row(line)
            if row is not None:
                error = self._try_write(row)
                refused += error is not None
            if refused and (row is None or error is not None):
                if refused == MAX_CONSECUTIVE_REFUSALS:
                    break
                continue
            self.progress.refused += refused
            refused = 0
            self._advance(pending)
            pending = []
            if line.number - start >= LINES_PER_ROUND:
                return
        if refused:
            raise TrackerDownError(_one_line(error)) from error

    def _read(self, start: int) -> Iterator[Line]:
        """Yield the lines after `start`, without the records of weights that are given up."""
        for line in read_lines(self._metrics_path, start, self.progress.offset):
            given_up = line.record is not None and self._is_given_up(line.number, line.record)
            yield replace(line, record=None) if given_up else line

    def _is_given_up(self, number: int, record: Mapping[str, Any]) -> bool:
        if record["source"] not in ("learner", "eval") or record["step"] is None:
            return False
        return any(number < rewind and record["step"] > step for rewind, step in self._rewinds)

    def _row(self, line: Line) -> Row | None:
        record = line.record
        if record is None or self.progress.is_sent(record):
            return None
        if record["source"] == "learner" and record["step"] is not None and record["step"] not in self._logged:
            return None
        fields = {key: record[key] for key in ("time", "source", "step", "labels", "values")}
        row = make_row(line.number, self.progress.step, **fields, samples=_samples(record))
        return row if row.values or row.samples else None

    def _try_write(self, row: Row) -> Exception | None:
        self.busy_since = time.monotonic()
        try:
            self._tracker.write(row)
        except Exception as error:
            return error
        finally:
            self.busy_since = None
        return None

    def _advance(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self.progress.repeated += line.record is not None and self.progress.is_sent(line.record)
            self.progress.advance(line.number, line.end, line.record)

    def _flush(self) -> None:
        self.busy_since = time.monotonic()
        try:
            self._tracker.flush()
        except Exception as error:
            raise TrackerDownError(_one_line(error)) from error
        finally:
            self.busy_since = None


def _find_rewinds(lines: Iterable[Line]) -> Iterator[tuple[int, int]]:
    """Yield the numbers of lines that give up earlier ones, and the step after which."""
    for line in lines:
        if line.record is not None and (step := (line.record.get("labels") or {}).get(REWOUND_TO)) is not None:
            yield line.number, int(step)


def _samples(record: Mapping[str, Any]) -> tuple[TextSample, ...]:
    try:
        return tuple(map(sample_from_row, record.get("samples", ())))
    except (TypeError, ValueError):  # edited by hand: its values are still good
        return ()


def _one_line(error: Exception | None) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
