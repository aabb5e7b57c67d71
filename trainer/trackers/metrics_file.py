"""`metrics.jsonl`: every metric record, across restarts.

Invariants: complete lines never move; an append is one write. Lines that a replaced learner appends again are read
once.
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.services.jsonl import LinesFile, last_lines
from offbeat.services.metric_registry import current_names
from offbeat.services.telemetry import MetricRecord, Partial
from offbeat.services.text_samples import sample_to_row

METRICS_FILE = "metrics.jsonl"
CHUNK_BYTES = 1 << 18


class MetricsFile:
    """JSON lines: id, time, source, step, labels, values (null if not finite), parts (a mean's count, or another value's
    kind), and at logged steps samples.
    """

    def __init__(self, path: Path) -> None:
        self._lines = LinesFile(path)  # first: it removes a cut last line, which must be written again
        self.position = newest_id(path)
        """Newest record's, or `0`."""
        self._rows: list[dict[str, Any]] = []

    def write(self, entry_id: str, record: MetricRecord) -> None:
        values = {name: p.value if math.isfinite(p.value) else None for name, p in record.values.items()}
        parts = {name: p.count if p.kind == "mean" else p.kind for name, p in record.values.items()}
        row = {"id": entry_id, "time": record.time, "source": record.source, "step": record.step}
        samples = {"samples": [sample_to_row(sample) for sample in record.samples]} if record.samples else {}
        self._rows.append({**row, "labels": record.labels, "values": values, "parts": parts, **samples})

    def flush(self) -> None:
        """Write the records. Raises OSError: they are not in the file, which has to be opened again for them."""
        rows, self._rows = self._rows, []
        if rows:
            self._lines.append(rows)

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._lines.close()


def newest_id(path: Path) -> str:
    """Return the newest record's id; `0` without any."""
    ids = [str(row["id"]) for row in last_lines(path) if "id" in row]
    return max(ids, key=id_order, default="0")


def id_order(entry_id: str) -> tuple[int, ...]:
    """Return the key by which records' ids are ordered."""
    return tuple(map(int, entry_id.split("-")))


def find_offset(path: Path, position: str) -> int:
    """Return where the records after `position` begin, in bytes; 0 without any up to it."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        low, high = 0, file.seek(0, os.SEEK_END)
        while high - low > CHUNK_BYTES:
            middle = (low + high) // 2
            file.seek(middle)
            file.readline()
            if _is_up_to(position, file.readline()):
                low = file.tell()
            else:
                high = middle
        file.seek(low)
        while _is_up_to(position, file.readline()):
            low = file.tell()
    return low


def _is_up_to(position: str, line: bytes) -> bool:
    record = _record(line) if line.endswith(b"\n") else None
    return record is not None and "id" in record and id_order(str(record["id"])) <= id_order(position)


def id_before(path: Path, offset: int) -> str:
    """Return the id of the record that ends at `offset`; empty if none does."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) < offset:
            return ""
        length = CHUNK_BYTES
        while True:
            start = max(0, offset - length)
            file.seek(start)
            *earlier, last = file.read(offset - start).splitlines(keepends=True) or [b""]
            if start == 0 or earlier:
                break
            length *= 2
    record = _record(last) if last.endswith(b"\n") else None
    return "" if record is None else str(record.get("id", ""))


def find_newest(path: Path, num_bytes: int) -> int:
    """Return where the first line in the last `num_bytes` begins; 0 of a smaller file. Raises OSError."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size <= num_bytes:
            return 0
        file.seek(size - num_bytes)
        file.readline()
        return file.tell()


def read_records(path: Path, offset: int = 0, after: str = "0") -> Iterator[dict[str, Any]]:
    """Yield the records from a line's `offset` on, without those up to `after`."""
    newest = id_order(after)
    for line in read_lines(path, 0, offset):
        record = line.record
        if record is None:
            continue
        if "id" in record:
            order = id_order(str(record["id"]))
            if order <= newest:  # as a writer appends in the order of ids, one that goes back repeats lines
                continue
            newest = order
        yield record


def read_metrics(path: Path, offset: int = 0, after: str = "0") -> Iterator[tuple[str, MetricRecord]]:
    """Yield (id, record) without samples; nothing of a file that an earlier version, without `parts`, began."""
    for row in read_records(path, offset, after):
        if "parts" not in row:
            return
        values = {name: _partial(value, row["parts"][name]) for name, value in row["values"].items()}
        named = current_names(row["source"], values)
        yield row["id"], MetricRecord(row["source"], named, row["step"], row["labels"], row["time"])


def _partial(value: float | None, part: Any) -> Partial:
    value = math.nan if value is None else value
    return Partial("mean", value * part, part) if isinstance(part, int | float) else Partial(part, value)


@dataclass(frozen=True, slots=True)
class Line:
    number: int
    """From 1."""
    end: int
    """Next line's byte offset."""
    record: dict[str, Any] | None
    """None if invalid."""


def read_lines(path: Path, number: int, offset: int) -> Iterator[Line]:
    """Yield complete lines after line `number`, which ends at `offset`."""
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
