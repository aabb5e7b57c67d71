"""Log files, and metrics merged from sums and counts."""

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import msgpack
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.errors import CodecError
from offbeat.services.keys import RunKeys
from offbeat.services.log_format import make_formatter
from offbeat.services.metric_registry import current_names
from offbeat.services.redis.run_writes import AsyncRunWrites, RunWrites
from offbeat.services.text_samples import TextSample, sample_from_row, sample_to_row

MAX_METRIC_RECORDS = 500_000
"""In Redis, while no learner copies them to `metrics.jsonl`."""
TRIMMED_AT_ONCE = 1000
"""As soon as so many more are there."""
KEPT_METRIC_RECORDS = 200_000
"""In Redis, of those that are in `metrics.jsonl`."""
CHATTY_LOGGERS = ("httpx", "httpcore")
"""A line per request, which is one per turn of an engine by HTTP and one per score of a judge."""


def configure_logging(service: str, log_dir: Path | None, level: int = logging.INFO) -> None:
    """Log to `log_dir/<service>.log`, or to stderr without `log_dir`."""
    handler: logging.Handler
    if log_dir is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        handler = logging.FileHandler(log_dir / f"{service}.log", errors="backslashreplace")
    handler.setFormatter(make_formatter(service))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


@dataclass(frozen=True, slots=True)
class Partial:
    """Mergeable part of a metric from one process.

    kind: `mean` merges as (sum, count); `sum` adds totals; `max` and `min` keep the extreme; `last` the newest.
    """

    kind: Literal["mean", "sum", "max", "min", "last"]
    total: float
    count: float = 1.0

    @property
    def value(self) -> float:
        return self.total / self.count if self.kind == "mean" and self.count else self.total

    def merge(self, other: "Partial") -> "Partial":
        """Merge two parts.

        Raises:
            ValueError: different kinds.
        """
        if self.kind != other.kind:
            raise ValueError(f"a {self.kind} does not merge with a {other.kind}")
        match self.kind:
            case "mean" | "sum":
                return Partial(self.kind, self.total + other.total, self.count + other.count)
            case "max":
                return Partial("max", max(self.total, other.total))
            case "min":
                return Partial("min", min(self.total, other.total))
            case "last":
                return other


def format_rate(rate: float) -> str:
    """Format a rate, with two digits below 10."""
    return f"{rate:,.0f}" if rate >= 10 or not rate else f"{rate:.2g}"


def mean(values: Iterable[float]) -> Partial:
    values = list(values)
    return Partial("mean", float(sum(values)), float(len(values)))


def merge_all(parts: Iterable[dict[str, Partial]]) -> dict[str, Partial]:
    out: dict[str, Partial] = {}
    for part in parts:
        for name, partial in part.items():
            out[name] = out[name].merge(partial) if name in out else partial
    return out


REWOUND_TO = "rewound_to"
"""Label of the learner's record that gives up evaluations after a step, with their weights."""


@dataclass(frozen=True, slots=True)
class MetricRecord:
    """Metrics of one component by name."""

    source: str
    """`learner`, `rollout`, `generation`, `weights`, `eval`, ..."""
    values: dict[str, Partial]
    step: int | None = None
    labels: dict[str, str] = field(default_factory=dict[str, str])
    time: float = field(default_factory=time.time)
    """Unix time, s."""
    samples: tuple[TextSample, ...] = ()


def encode_record(record: MetricRecord) -> bytes:
    values = {name: [p.kind, p.total, p.count] for name, p in record.values.items()}
    fields: list[Any] = [record.source, values, record.step, record.labels, record.time]
    if record.samples:
        fields.append([sample_to_row(sample) for sample in record.samples])
    return cast(bytes, msgpack.packb(fields, unicode_errors="surrogatepass"))


def decode_record(blob: bytes) -> MetricRecord:
    """Unpack a record, with current names; raises `CodecError`."""
    try:
        source, values, step, labels, at, *rows = msgpack.unpackb(blob, unicode_errors="surrogatepass")
        samples = tuple(map(sample_from_row, rows[0])) if rows else ()
        partials = {str(k): Partial(kind, float(total), float(count)) for k, (kind, total, count) in values.items()}
        return MetricRecord(str(source), current_names(source, partials), step, dict(labels), float(at), samples)
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise CodecError(f"malformed metric record: {error}") from error


class MetricsSink(Protocol):
    def append(self, record: MetricRecord, once: str = "") -> None:
        """Append a record. once: a name, under which the run has one record, whichever process appends it."""
        ...


_ENTRY = ("*", "r")
"""Arguments of XADD."""
IDLE_S = 10.0
"""Workers and replicas write a record each second: after so long without any, nobody wrote."""


def _trim_noted() -> str:
    """Return Lua that bounds the stream, and notes when the records that it trims were written."""
    return f"""
local length = redis.call('XLEN', KEYS[3])
if length >= {MAX_METRIC_RECORDS + TRIMMED_AT_ONCE} then
  local noted, entries = KEYS[3] .. ':trimmed', redis.call('XRANGE', KEYS[3], '-', '+', 'COUNT', {TRIMMED_AT_ONCE + 1})
  local function to_ms(id) return tonumber(string.match(id, '^%d+')) end
  local id = entries[1][1]
  local first, next_id = string.match(redis.call('LINDEX', noted, -1) or '', '^(%S+) (%S+)$')
  if next_id == id then redis.call('RPOP', noted) else first = id end
  for i = 2, #entries do
    local later = entries[i][1]
    if to_ms(later) - to_ms(id) > {1000 * IDLE_S:.0f} then
      redis.call('RPUSH', noted, first .. ' ' .. id)
      first = later
    end
    id = later
  end
  redis.call('RPUSH', noted, first .. ' ' .. id)
  redis.call('XTRIM', KEYS[3], 'MAXLEN', length - {TRIMMED_AT_ONCE})
end
"""


class RedisMetrics:
    def __init__(self, redis: Redis, run_id: str, uid: str = "") -> None:
        self._redis = redis
        self._key, self._trimmed_key = RunKeys(run_id).metrics, RunKeys(run_id).trimmed_metrics
        self._write = RunWrites(redis, run_id, uid, _trim_noted())

    def append(self, record: MetricRecord, once: str = "") -> None:
        if once:
            self._write.once_by_name(once, "XADD", self._key, *_ENTRY, encode_record(record))
        else:
            self._write.once("XADD", self._key, *_ENTRY, encode_record(record))

    def read(
        self, after: str = "0", *, block_ms: int | None = None, count: int = 1000
    ) -> Iterator[tuple[str, MetricRecord]]:
        """Yield (id, record) after `after`, waiting up to `block_ms` for the first. Raises `CodecError`."""
        for entry_id, encoded in self.read_encoded(after, block_ms=block_ms, count=count):
            yield entry_id, decode_record(encoded)

    def seconds_trimmed(self, after: str) -> float:
        """Return the time of the records after `after` that were trimmed, without time in which nobody wrote."""
        stretches = [each.split() for each in cast(list[bytes], self._redis.lrange(self._trimmed_key, 0, -1))]
        copied_ms = _to_ms(after.encode())
        lost_ms = (_to_ms(next_id) - max(_to_ms(first), copied_ms) for first, next_id in stretches)
        return sum(max(0, each) for each in lost_ms) / 1000

    def forget_trimmed(self) -> None:
        """Forget which records were trimmed, once they are reported."""
        self._write("DEL", self._trimmed_key)

    def trim(self, kept: int) -> None:
        self._redis.xtrim(self._key, maxlen=kept)

    def read_encoded(
        self, after: str = "0", *, block_ms: int | None = None, count: int = 1000
    ) -> Iterator[tuple[str, bytes]]:
        """Yield (id, encoded record), as `read`."""
        streams = cast(list[Any], self._redis.xread({self._key: after}, count=count, block=block_ms) or [])
        for _, entries in streams:
            for entry_id, fields in entries:
                yield entry_id.decode(), fields[b"r"]


def _to_ms(entry_id: bytes) -> int:
    return int(entry_id.partition(b"-")[0])


class AsyncRedisMetrics:
    def __init__(self, redis: AsyncRedis, run_id: str, uid: str = "") -> None:
        self._redis = redis
        self._key = RunKeys(run_id).metrics
        self._write = AsyncRunWrites(redis, run_id, uid, _trim_noted())

    async def append(self, record: MetricRecord) -> None:
        await self._write.once("XADD", self._key, *_ENTRY, encode_record(record))

    async def read(self, after: str = "0", *, count: int = 1000) -> list[tuple[str, MetricRecord]]:
        """Return (id, record) after `after`."""
        entries = await self._redis.xrange(self._key, min=f"({after}" if after != "0" else "-", count=count)
        return [(entry_id.decode(), decode_record(fields[b"r"])) for entry_id, fields in entries]
