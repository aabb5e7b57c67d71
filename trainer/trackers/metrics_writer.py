"""Thread that writes metrics to `metrics.jsonl` and in-learner trackers.

Invariant: each record is written once, across restarts (the last line holds the position).
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from pydantic import JsonValue
from redis import Redis
from redis.exceptions import RedisError

from offbeat.services.errors import CodecError
from offbeat.services.telemetry import MetricRecord, RedisMetrics
from offbeat.services.threads import Follower
from offbeat.trainer.trackers.base import LoggedSteps, Row, TrackedRun, Tracker, make_row
from offbeat.trainer.trackers.metrics_file import METRICS_FILE, MetricsFile
from offbeat.trainer.trackers.registry import IN_LEARNER, arguments, find_tracker

logger = logging.getLogger(__name__)

BLOCK_MS = 500
RETRY_S = 1.0
TRACKER_RETRY_S = 60.0
"""Each try may leave an empty file."""


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
    ) -> None:
        """names, kwargs: `track_with` and `tracker_kwargs`, of which in-learner trackers are used. logged: steps for
        trackers; None: all.
        """
        self._stream = RedisMetrics(redis, run_id)
        self._run_id = run_id
        self._output_dir = output_dir
        self._names = [name for name in names if name in IN_LEARNER]
        self._kwargs = kwargs or {}
        self._logged = logged or LoggedSteps()
        self._step = resumed_step
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
        records: list[MetricRecord] = []
        try:
            for entry_id, record in self._stream.read(position, block_ms=block_ms):
                file.write(entry_id, record)
                records.append(record)
                position = entry_id
        except RedisError as error:
            logger.warning("cannot read metrics: %s; retrying in %.0f s", error, RETRY_S)
            self._stop.wait(RETRY_S)
        except CodecError as error:
            logger.warning("malformed metric record after %s: %s; later records are not tracked", position, error)
            self._stop.wait()
        file.flush()
        if rows := [row for record in records if (row := self._make_row(record)) is not None]:
            for tracker in trackers:
                tracker.write(rows)
        return position, len(records)

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
        self._retry_at = 0.0

    def write(self, rows: Sequence[Row]) -> None:
        if self._tracker is None and time.monotonic() < self._retry_at:
            return
        try:
            if self._tracker is None:
                self._tracker = self._make(self._newest_step)
            for row in rows:
                self._tracker.write(row)
            self._tracker.flush()
        except OSError as error:
            text = "%s can't be written: %s; rows until it can are in metrics.jsonl only; retrying every %.0f s"
            if not self._retry_at:
                logger.warning(text, self._name, error, TRACKER_RETRY_S)
            self.close()
            self._retry_at = time.monotonic() + TRACKER_RETRY_S
            return
        if self._retry_at:
            logger.info("%s can be written again", self._name)
            self._retry_at = 0.0
        self._newest_step = max(self._newest_step, *(row.step for row in rows))

    def close(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            with suppress(OSError):  # logged when it was written
                tracker.close("stopped")
