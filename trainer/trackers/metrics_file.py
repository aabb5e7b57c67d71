"""`metrics.jsonl`: every metric record exactly once, across learner restarts.

Invariant: complete lines never move, so byte offsets stay valid.
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
    """One JSON object per record: id, time, source, step, labels, values (null if not finite)."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.position = _last_position(path)
        """Stream id of the last record in the file, or `0`."""
        self._file = path.open("a", encoding="utf-8")

    def write(self, entry_id: str, record: MetricRecord) -> None:
        """Append a record."""
        values = {name: p.value if math.isfinite(p.value) else None for name, p in record.values.items()}
        row = {"id": entry_id, "time": record.time, "source": record.source, "step": record.step}
        self._file.write(json.dumps({**row, "labels": record.labels, "values": values}) + "\n")

    def flush(self) -> None:
        """Make records visible to readers."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _last_position(path: Path) -> str:
    """Return the last complete line's id; truncate an incomplete one."""
    if not path.exists():
        return "0"
    lines = path.read_bytes().splitlines(keepends=True)
    complete = [line for line in lines if line.endswith(b"\n")]
    if len(complete) < len(lines):
        path.write_bytes(b"".join(complete))
    return str(json.loads(complete[-1])["id"]) if complete else "0"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the file."""

    number: int
    """From 1."""
    end: int
    """Byte offset of the next line."""
    record: dict[str, Any] | None
    """None without a valid record."""


def read_lines(path: Path, number: int, offset: int) -> Iterator[Line]:
    """Yield complete lines after line `number`, which ends at byte `offset`."""
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
