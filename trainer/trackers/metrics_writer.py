"""Thread that writes metrics to `metrics.jsonl` and in-learner trackers.

Invariant: each record is written once, across restarts (the last line holds the position). A record tells of those that
Redis trimmed while there was no writer.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from pydantic import JsonValue
from redis import Redis
from redis.exceptions import RedisError

from offbeat.services.errors import CodecError
from offbeat.services.telemetry import KEPT_METRIC_RECORDS, MetricRecord, Partial, RedisMetrics, decode_record
from offbeat.services.threads import Follower
from offbeat.trainer.trackers.base import LoggedSteps, Row, TrackedRun, Tracker, make_row
from offbeat.trainer.trackers.metrics_file import METRICS_FILE, MetricsFile, id_order
from offbeat.trainer.trackers.registry import IN_LEARNER, arguments, find_tracker

logger = logging.getLogger(__name__)

BLOCK_MS = 500
RETRY_S = 1.0
PAGE_SIZE = 1000
TRIM_INTERVAL_S = 10.0
MIN_GAP_S = 1.0
"""Workers and replicas write a record each second."""
MAX_TRACKER_RETRY_S = 60.0
"""The first wait is `RETRY_S`, each the double of the last; each try may leave an empty file."""
MAX_WAITING_ROWS = 10_000
"""For a tracker that can't be written; the oldest are given up."""


class MetricsWriter(Follower):
    def __init__(
        self,
        redis: Redis,
        run_id: str,
        output_dir: Path,
        names: Sequence[str],
        resumed_step: int,
        kwargs: Mapping[str, Mapping[str, JsonValue]] | None = None,
        logged: LoggedSteps | None = None,
        uid: str = "",
    ) -> None:
        """names, kwargs: `track_with` and `tracker_kwargs`, of which in-learner trackers are used. logged: steps for
        trackers; None: all.
        """
        self._stream = RedisMetrics(redis, run_id, uid)
        self._run_id = run_id
        self._output_dir = output_dir
        self._names = [name for name in names if name in IN_LEARNER]
        self._kwargs = kwargs or {}
        self._logged = logged or LoggedSteps()
        self._step = resumed_step
        self._unsent: list[tuple[str, MetricRecord]] = []
        """Read, but neither known to be in the file nor sent to trackers."""
        self._has_left_out = False
        self._is_gap_checked = False
        self._trimmed_at = 0.0
        super().__init__("trackers")

    def _follow(self) -> None:
        trackers = [_GuardedTracker(partial(self._make_tracker, name), name, self._step) for name in self._names]
        logged = ""
        try:
            while True:
                try:
                    self._write_until_stopped(trackers)
                    return
                except OSError as error:  # for example a full disk; the stream still holds the records
                    if logged != str(error):
                        logger.warning("cannot write metrics: %s; retrying every %.0f s", error, RETRY_S)
                    logged = str(error)
                if self._stop.wait(RETRY_S):
                    return
        finally:
            for tracker in trackers:
                tracker.close()

    def _write_until_stopped(self, trackers: Sequence["_GuardedTracker"]) -> None:
        with closing(MetricsFile(self._output_dir / METRICS_FILE)) as file:
            position = file.position
            self._is_gap_checked = False
            # A write that was cut short has kept its first lines, which are not read again
            self._send([each for each in self._unsent if id_order(each[0]) <= id_order(position)], trackers)
            while True:
                last_round = self._stop.is_set()
                position, count = self._forward(file, trackers, position, None if last_round else BLOCK_MS)
                if last_round and not count:
                    return

    def _make_tracker(self, name: str, resumed_step: int) -> Tracker:
        tracker_class = find_tracker(name)
        folder = self._output_dir / name
        run = TrackedRun(self._run_id, "", resumed_step > 0, resumed_step, folder, {})
        return tracker_class(run, **arguments(tracker_class, self._kwargs.get(name, {})))

    def _forward(
        self, file: MetricsFile, trackers: Sequence["_GuardedTracker"], position: str, block_ms: int | None
    ) -> tuple[str, int]:
        """Write records after `position`, to the file first; return the new position and their number."""
        self._unsent, count = [], 0
        try:
            self._report_gap(position)
            for entry_id, encoded in self._stream.read_encoded(position, block_ms=block_ms, count=PAGE_SIZE):
                position, count = entry_id, count + 1
                if (record := self._decode(entry_id, encoded)) is not None:
                    file.write(entry_id, record)
                    self._unsent.append((entry_id, record))
        except RedisError as error:
            logger.warning("cannot read metrics: %s; retrying in %.0f s", error, RETRY_S)
            self._stop.wait(RETRY_S)
        file.flush()
        self._send(self._unsent, trackers)
        if count < PAGE_SIZE:
            self._trim()
        return position, count

    def _report_gap(self, position: str) -> None:
        """Report records after `position` that were trimmed, as a record of their own; once per position."""
        if self._is_gap_checked:
            return
        lost_s = self._stream.seconds_trimmed(position)
        if lost_s >= MIN_GAP_S:
            logger.warning(
                "metric records of %.0f s are missing: they were trimmed in Redis before they were copied", lost_s
            )
            record = MetricRecord("trackers", {"metrics_lost_s": Partial("sum", lost_s)})
            self._stream.append(record, once=f"metrics lost after {position}")
            self._stream.forget_trimmed()
        self._is_gap_checked = True

    def _trim(self) -> None:
        if time.monotonic() < self._trimmed_at + TRIM_INTERVAL_S:
            return
        with suppress(RedisError):  # the next read reports it
            self._stream.trim(KEPT_METRIC_RECORDS)
        self._trimmed_at = time.monotonic()

    def _decode(self, entry_id: str, encoded: bytes) -> MetricRecord | None:
        try:
            return decode_record(encoded)
        except CodecError as error:  # of another build's process
            if not self._has_left_out:
                logger.warning("%s of id %s; this one and further ones are left out", error, entry_id)
            self._has_left_out = True
            return None

    def _send(self, records: Sequence[tuple[str, MetricRecord]], trackers: Sequence["_GuardedTracker"]) -> None:
        self._unsent = []
        rows = [row for _, record in records if (row := self._make_row(record)) is not None]
        for tracker in trackers:
            tracker.write(rows)

    def _make_row(self, record: MetricRecord) -> Row | None:
        values = {name: each.value for name, each in record.values.items()}
        row = make_row(0, self._step, record.time, record.source, record.step, record.labels, values, record.samples)
        self._step = max(self._step, row.step)
        is_logged = record.source != "learner" or record.step is None or record.step in self._logged
        return row if is_logged else None


class _GuardedTracker:
    """Tracker whose failures keep no record from `metrics.jsonl`; it is opened with the first row."""

    def __init__(self, make: Callable[[int], Tracker], name: str, resumed_step: int) -> None:
        """make: takes the step after which rows repeat earlier ones."""
        self._make = make
        self._name = name
        self._newest_step = resumed_step
        self._tracker: Tracker | None = None
        self._waiting: deque[Row] = deque(maxlen=MAX_WAITING_ROWS)
        self._retry_at = self._wait_s = 0.0

    def write(self, rows: Sequence[Row]) -> None:
        """Write the rows, after those that a failure has left; call it without rows to try again."""
        self._waiting.extend(rows)
        if time.monotonic() >= self._retry_at:
            self._write_waiting()

    def close(self) -> None:
        self._write_waiting()
        self._close_tracker()

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        try:
            if self._tracker is None:
                self._tracker = self._make(self._newest_step)
            for row in self._waiting:
                self._tracker.write(row)
            self._tracker.flush()
        except Exception as error:  # TensorBoard writes by TensorFlow, with errors of its own, where that is installed
            text = "%s can't be written: %s; the newest %d rows are kept for it; retrying every %.0f s at most"
            if not self._wait_s:
                logger.warning(text, self._name, error, MAX_WAITING_ROWS, MAX_TRACKER_RETRY_S)
            self._close_tracker()
            self._wait_s = min(2 * self._wait_s or RETRY_S, MAX_TRACKER_RETRY_S)
            self._retry_at = time.monotonic() + self._wait_s
            return
        if self._wait_s:
            logger.info("%s can be written again", self._name)
            self._retry_at = self._wait_s = 0.0
        self._newest_step = max(self._newest_step, *(row.step for row in self._waiting))
        self._waiting.clear()

    def _close_tracker(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            with suppress(Exception):  # logged when it was written
                tracker.close("stopped")
