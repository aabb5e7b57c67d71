"""Thread that writes metrics to `metrics.jsonl` and in-learner trackers.

Invariant: each record is written once, across restarts (the last line holds the position).
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue
from redis import Redis
from redis.exceptions import RedisError

from offbeat.services.errors import CodecError
from offbeat.services.telemetry import MetricRecord, RedisMetrics
from offbeat.services.threads import Follower
from offbeat.trainer.trackers.base import LoggedSteps, TrackedRun, Tracker, make_row
from offbeat.trainer.trackers.metrics_file import METRICS_FILE, MetricsFile
from offbeat.trainer.trackers.registry import IN_LEARNER, arguments, find_tracker

logger = logging.getLogger(__name__)

BLOCK_MS = 500
RETRY_S = 1.0


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
        self._resumed_step = self._step = resumed_step
        super().__init__("trackers")

    def _follow(self) -> None:
        logged = ""
        while True:
            try:
                self._write_until_stopped()
                return
            except OSError as error:  # for example a full disk; the stream still holds the records
                if logged != str(error):
                    logger.warning("cannot write metrics: %s; retrying every %.0f s", error, RETRY_S)
                logged = str(error)
            if self._stop.wait(RETRY_S):
                return
            self._resumed_step = self._step

    def _write_until_stopped(self) -> None:
        file = MetricsFile(self._output_dir / METRICS_FILE)
        trackers = {name: self._make_tracker(name) for name in self._names}
        position = file.position
        try:
            while True:
                last_round = self._stop.is_set()
                position, count = self._forward(file, trackers, position, None if last_round else BLOCK_MS)
                if last_round and not count:
                    return
        finally:
            for tracker in trackers.values():
                tracker.close("stopped")
            file.close()

    def _make_tracker(self, name: str) -> Tracker:
        tracker_class = find_tracker(name)
        folder = self._output_dir / name
        run = TrackedRun(self._run_id, "", self._resumed_step > 0, self._resumed_step, folder, {})
        return tracker_class(run, **arguments(tracker_class, self._kwargs.get(name, {})))

    def _forward(
        self, file: MetricsFile, trackers: Mapping[str, Tracker], position: str, block_ms: int | None
    ) -> tuple[str, int]:
        """Write records after `position`; return the new position and their number."""
        count = 0
        try:
            for entry_id, record in self._stream.read(position, block_ms=block_ms):
                file.write(entry_id, record)
                for tracker in trackers.values():
                    self._write(tracker, record)
                position = entry_id
                count += 1
        except RedisError as error:
            logger.warning("cannot read metrics: %s; retrying in %.0f s", error, RETRY_S)
            self._stop.wait(RETRY_S)
        except CodecError as error:
            logger.warning("malformed metric record after %s: %s; later records are not tracked", position, error)
            self._stop.wait()
        if count:
            file.flush()
            for tracker in trackers.values():
                tracker.flush()
        return position, count

    def _write(self, tracker: Tracker, record: MetricRecord) -> None:
        values = {name: partial.value for name, partial in record.values.items()}
        row = make_row(0, self._step, record.time, record.source, record.step, record.labels, values, record.samples)
        self._step = max(self._step, row.step)
        if record.source != "learner" or record.step is None or record.step in self._logged:
            tracker.write(row)
