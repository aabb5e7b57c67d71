"""`metrics.jsonl`: every record of a run, once, over all lives of the learner; trackers follow it.

Invariant: a line that has its end stays where it is, so a reader's place in the file is one for good.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.services.telemetry import MetricRecord

METRICS_FILE = "metrics.jsonl"
CHUNK_BYTES = 1 << 18


class MetricsFile:
    """One JSON object per record: id, time, source, step, labels, values (null where not finite)."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.position = _last_position(path)
        """Id of the last record in the file, `0` without one."""
        self._file = path.open("a", encoding="utf-8")

    def write(self, entry_id: str, record: MetricRecord) -> None:
        """Add a record at the end."""
        values = {name: p.value if math.isfinite(p.value) else None for name, p in record.values.items()}
        row = {"id": entry_id, "time": record.time, "source": record.source, "step": record.step}
        self._file.write(json.dumps({**row, "labels": record.labels, "values": values}) + "\n")

    def flush(self) -> None:
        """Let readers have what was written."""
        self._file.flush()

    def close(self) -> None:
        """Write no more."""
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


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the file, and where the next one begins."""

    number: int
    """From 1."""
    end: int
    """Bytes."""
    record: dict[str, Any] | None
    """None: it holds none."""


def read_lines(path: Path, number: int, offset: int) -> Iterator[Line]:
    """The whole lines behind line `number`, which ends at byte `offset`, as many as are there."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        while lines := file.readlines(CHUNK_BYTES):
            for line in lines:
                if not line.endswith(b"\n"):
                    return
                number, offset = number + 1, offset + len(line)
                yield Line(number, offset, _record(line))


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
