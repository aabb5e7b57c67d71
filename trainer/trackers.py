"""Writes a run's metric records to TensorBoard and to `metrics.jsonl`, beside the training.

Invariants: each record is written once, over all lives of the learner (the file's last line says how far it came); steps
that a resumed learner repeats replace the earlier ones in TensorBoard.
"""

import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from redis import Redis
from redis.exceptions import RedisError

from services.errors import CodecError
from services.following import Follower
from services.telemetry import MetricRecord, RedisMetrics

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
TENSORBOARD = "tensorboard"
BLOCK_MS = 500
RETRY_S = 1.0


class Tracker(Protocol):
    """Takes metric records in the order in which they were written."""

    def write(self, entry_id: str, record: MetricRecord) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """One JSON object per record: id, time, source, step, labels, values (null where not finite)."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.position = _last_position(path)
        """Id of the last record in the file, `0` without one."""
        self._file = path.open("a", encoding="utf-8")

    def write(self, entry_id: str, record: MetricRecord) -> None:
        """See `Tracker`."""
        values = {name: p.value if math.isfinite(p.value) else None for name, p in record.values.items()}
        row = {"id": entry_id, "time": record.time, "source": record.source, "step": record.step}
        self._file.write(json.dumps({**row, "labels": record.labels, "values": values}) + "\n")

    def flush(self) -> None:
        """See `Tracker`."""
        self._file.flush()

    def close(self) -> None:
        """See `Tracker`."""
        self._file.close()


def _last_position(path: Path) -> str:
    """Where a file that may have been cut off in its last line ends; what is cut off is removed."""
    if not path.exists():
        return "0"
    lines = path.read_bytes().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    if len(whole) < len(lines):
        path.write_bytes(b"".join(whole))
    return str(json.loads(whole[-1])["id"]) if whole else "0"


class TensorBoard:
    """Scalars over the learner's step; records without one stand at the newest step seen."""

    def __init__(self, folder: Path, purge_step: int) -> None:
        # tensorboard's own writer: torch.utils.tensorboard would import much more
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = cast(Any, event_pb2), cast(Any, summary_pb2)
        self._writer: Any = EventFileWriter(str(folder))
        self._step = purge_step
        if purge_step > 0:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer.add_event(self._events.Event(step=purge_step + 1, session_log=start))

    def write(self, entry_id: str, record: MetricRecord) -> None:
        """See `Tracker`."""
        del entry_id
        step = self._step if record.step is None else record.step
        self._step = max(self._step, step)
        make = self._summaries.Summary
        values = [make.Value(tag=tag, simple_value=value) for tag, value in _scalars(record) if math.isfinite(value)]
        if values:
            event = self._events.Event(wall_time=record.time, step=step, summary=make(value=values))
            self._writer.add_event(event)

    def flush(self) -> None:
        """See `Tracker`."""
        self._writer.flush()

    def close(self) -> None:
        """See `Tracker`."""
        self._writer.close()


def _scalars(record: MetricRecord) -> Iterator[tuple[str, float]]:
    parts = [record.source]
    if record.source == "eval":
        parts.append(f"{record.labels.get('sampling', 'sampled')}")
    elif "kind" in record.labels:
        parts.append(record.labels["kind"])
    for name, partial in record.values.items():
        yield "/".join([*parts, name]), partial.value


class TrackerThread(Follower):
    """Follows a run's metrics stream from where the file ended."""

    def __init__(self, redis: Redis, run_id: str, output_dir: Path, names: Sequence[str], resumed_step: int) -> None:
        self._stream = RedisMetrics(redis, run_id)
        self._output_dir = output_dir
        self._names = names
        self._resumed_step = resumed_step
        super().__init__("trackers")

    def _follow(self) -> None:
        file = MetricsFile(self._output_dir / METRICS_FILE)
        trackers: list[Tracker] = [file]
        if "tensorboard" in self._names:
            trackers.append(TensorBoard(self._output_dir / TENSORBOARD, self._resumed_step))
        position = file.position
        try:
            while True:
                last_round = self._stop.is_set()
                position, count = self._pass_on(trackers, position, None if last_round else BLOCK_MS)
                if last_round and not count:
                    return
        finally:
            for tracker in trackers:
                tracker.close()

    def _pass_on(self, trackers: Sequence[Tracker], position: str, block_ms: int | None) -> tuple[str, int]:
        """Write what came after `position`; returns the new position and how many records there were."""
        count = 0
        try:
            for entry_id, record in self._stream.read(position, block_ms=block_ms):
                for tracker in trackers:
                    tracker.write(entry_id, record)
                position = entry_id
                count += 1
        except RedisError as error:
            logger.warning("metrics can't be read now: %s", error)
            self._stop.wait(RETRY_S)
        except CodecError as error:
            logger.warning("a metric record after %s can't be read, the rest is not tracked: %s", position, error)
            self._stop.wait()
        if count:
            for tracker in trackers:
                tracker.flush()
        return position, count
