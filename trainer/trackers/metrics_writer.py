"""Writes a run's metric records to `metrics.jsonl`, and to trackers that need no process of their own, beside the training.

Invariant: each record is in the file once, over all lives of the learner (the file's last line says how far it came).
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
from offbeat.trainer.trackers.base import TrackedRun, Tracker, row_of
from offbeat.trainer.trackers.metrics_file import METRICS_FILE, MetricsFile
from offbeat.trainer.trackers.registry import IN_LEARNER, arguments, find_tracker

logger = logging.getLogger(__name__)

BLOCK_MS = 500
RETRY_S = 1.0


class MetricsWriter(Follower):
    """Follows a run's metrics stream from where the file ended."""

    def __init__(
        self,
        redis: Redis,
        run_id: str,
        output_dir: Path,
        names: Sequence[str],
        resumed_step: int,
        kwargs: Mapping[str, Mapping[str, JsonValue]] | None = None,
    ) -> None:
        """names, kwargs: `track_with` and `tracker_kwargs`; those with a process of their own are passed over."""
        self._stream = RedisMetrics(redis, run_id)
        self._run_id = run_id
        self._output_dir = output_dir
        self._names = [name for name in names if name in IN_LEARNER]
        self._kwargs = kwargs or {}
        self._resumed_step = self._step = resumed_step
        super().__init__("trackers")

    def _follow(self) -> None:
        told = ""
        while True:
            try:
                self._write_down()
                return
            except OSError as error:  # the disk is full, say: what the file lacks is in the stream
                if told != str(error):
                    logger.warning("metrics can't be written now: %s", error)
                told = str(error)
            if self._stop.wait(RETRY_S):
                return
            self._resumed_step = self._step

    def _write_down(self) -> None:
        """From where the file ends until the learner does. Raises OSError."""
        file = MetricsFile(self._output_dir / METRICS_FILE)
        trackers = {name: self._made(name) for name in self._names}
        position = file.position
        try:
            while True:
                last_round = self._stop.is_set()
                position, count = self._pass_on(file, trackers, position, None if last_round else BLOCK_MS)
                if last_round and not count:
                    return
        finally:
            for tracker in trackers.values():
                tracker.close("stopped")
            file.close()

    def _made(self, name: str) -> Tracker:
        kind = find_tracker(name)
        folder = self._output_dir / name
        run = TrackedRun(self._run_id, "", self._resumed_step > 0, self._resumed_step, folder, {})
        return kind(run, **arguments(kind, self._kwargs.get(name, {})))

    def _pass_on(
        self, file: MetricsFile, trackers: Mapping[str, Tracker], position: str, block_ms: int | None
    ) -> tuple[str, int]:
        """Write what came after `position`; returns the new position and how many records there were."""
        count = 0
        try:
            for entry_id, record in self._stream.read(position, block_ms=block_ms):
                file.write(entry_id, record)
                for tracker in trackers.values():
                    self._write(tracker, record)
                position = entry_id
                count += 1
        except RedisError as error:
            logger.warning("metrics can't be read now: %s", error)
            self._stop.wait(RETRY_S)
        except CodecError as error:
            logger.warning("a metric record after %s can't be read, the rest is not tracked: %s", position, error)
            self._stop.wait()
        if count:
            file.flush()
            for tracker in trackers.values():
                tracker.flush()
        return position, count

    def _write(self, tracker: Tracker, record: MetricRecord) -> None:
        values = {name: partial.value for name, partial in record.values.items()}
        row = row_of(0, self._step, record.time, record.source, record.step, record.labels, values)
        self._step = max(self._step, row.step)
        tracker.write(row)
