"""A run's metric records as counters, summaries and gauges.

Counters start when the control service begins to follow the run, as after a restart.
"""

import math
from collections.abc import Iterator
from typing import Any, cast

from redis.asyncio import Redis

from offbeat.services.control.prometheus.families import Family, FamilySample, FamilyType, MetricPlace, find_place
from offbeat.services.errors import CodecError
from offbeat.services.keys import RunKeys
from offbeat.services.telemetry import MetricRecord, Partial, decode_record

BUCKET_S = 15
WINDOW_BUCKETS = 4
"""Gauges of services merge the last minute."""
KEPT_SOURCES = ("learner", "eval", "trackers")
"""Sources whose newest value stays, however old."""
DROPPED_LABELS = ("worker", "phase")
REPLICA = "replica"
MAX_SERIES = 5_000
"""Per run; envs and agents name metrics."""
MAX_REPLICA_SERIES = 20_000
"""Per run; gauges of replicas have room of their own, so that many of them leave no other series out."""
PAGE_SIZE = 200
"""Records read without yielding to other calls."""
FIRST_PAGES = 5

SeriesKey = tuple[Family, tuple[tuple[str, str], ...]]


class RunMeters:
    def __init__(self) -> None:
        self.num_left_out = 0
        """Values beyond `MAX_SERIES` and `MAX_REPLICA_SERIES`."""
        self._totals: dict[SeriesKey, Partial] = {}
        self._newest: dict[SeriesKey, Partial] = {}
        self._recent: dict[SeriesKey, dict[int, Partial]] = {}
        self._replicas: dict[SeriesKey, dict[int, Partial]] = {}
        """Recent values of single replicas."""
        self._pruned_at = 0

    def add(self, record: MetricRecord, at: float) -> None:
        """Add a record that was appended at `at` (Unix time)."""
        for name, partial in record.values.items():
            place = find_place(record.source, name)
            if place is not None and math.isfinite(partial.total):
                self._add(place, record, partial, int(at // BUCKET_S))

    def samples(self, now: float) -> Iterator[FamilySample]:
        """Yield the samples; the order of a family's labels is fixed."""
        for (family, labels), partial in self._totals.items():
            if family.type is FamilyType.SUMMARY:
                yield FamilySample(family, partial.total, dict(labels), "_sum")
                yield FamilySample(family, partial.count, dict(labels), "_count")
            else:
                yield FamilySample(family, partial.total, dict(labels), "_total")
        for (family, labels), partial in self._newest.items():
            yield FamilySample(family, partial.value, dict(labels))
        self._prune(int(now // BUCKET_S))
        oldest = int(now // BUCKET_S) - WINDOW_BUCKETS
        for store in (self._recent, self._replicas):
            for (family, labels), buckets in store.items():
                parts = [partial for bucket, partial in sorted(buckets.items()) if bucket > oldest]
                yield FamilySample(family, _merge(parts).value, dict(labels))

    def _add(self, place: MetricPlace, record: MetricRecord, partial: Partial, bucket: int) -> None:
        kind = _family_type(partial, place, record.source)
        dropped = (*DROPPED_LABELS, *(() if kind is FamilyType.GAUGE else (REPLICA,)))
        labels = {name: value for name, value in record.labels.items() if name not in dropped} | dict(place.labels)
        key = Family(place.name, kind, place.help), tuple(sorted(labels.items()))
        recent = self._replicas if REPLICA in labels else self._recent
        if not self._has_room(key, bucket, recent):
            self.num_left_out += 1
        elif kind is not FamilyType.GAUGE:
            self._totals[key] = self._totals[key].merge(partial) if key in self._totals else partial
        elif record.source in KEPT_SOURCES:
            self._newest[key] = partial
        else:
            buckets = {each: part for each, part in recent.get(key, {}).items() if each > bucket - WINDOW_BUCKETS}
            buckets[bucket] = buckets[bucket].merge(partial) if bucket in buckets else partial
            recent[key] = buckets

    def _has_room(self, key: SeriesKey, bucket: int, recent: dict[SeriesKey, dict[int, Partial]]) -> bool:
        stores = [self._replicas] if recent is self._replicas else [self._totals, self._newest, self._recent]
        if any(key in store for store in stores):
            return True
        limit = MAX_REPLICA_SERIES if recent is self._replicas else MAX_SERIES
        if sum(map(len, stores)) >= limit and bucket > self._pruned_at:
            self._prune(bucket)
        return sum(map(len, stores)) < limit

    def _prune(self, bucket: int) -> None:
        """Forget series without a value in the window: their replicas are gone."""
        self._pruned_at = max(self._pruned_at, bucket)
        for store in (self._recent, self._replicas):
            for key in [key for key, buckets in store.items() if max(buckets) <= bucket - WINDOW_BUCKETS]:
                del store[key]


def _family_type(partial: Partial, place: MetricPlace, source: str) -> FamilyType:
    if partial.kind == "sum" and source != "eval":  # an evaluation's sums are of it alone
        return FamilyType.COUNTER
    is_duration = partial.kind == "mean" and place.unit == "s" and source not in KEPT_SOURCES
    return FamilyType.SUMMARY if is_duration else FamilyType.GAUGE


def _merge(parts: list[Partial]) -> Partial:
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    return merged


class MeterReader:
    """Reader of a run's metric stream."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self.meters = RunMeters()
        self._redis = redis
        self._key = RunKeys(run_id).metrics
        self._position: str | None = None

    async def read(self) -> None:
        """Read what was appended since the last call; at first the newest pages."""
        if self._position is None:
            self._position = await self._find_start()
        while self._take(await self._redis.xrange(self._key, min=f"({self._position}", count=PAGE_SIZE)) == PAGE_SIZE:
            pass

    async def _find_start(self) -> str:
        newest = cast(list[Any], await self._redis.xrevrange(self._key, count=FIRST_PAGES * PAGE_SIZE + 1))
        return newest[-1][0].decode() if len(newest) > FIRST_PAGES * PAGE_SIZE else "0-0"

    def _take(self, entries: list[Any]) -> int:
        for raw_id, fields in entries:
            entry_id: str = raw_id.decode()
            self._position = entry_id
            try:
                record = decode_record(fields[b"r"])
            except CodecError:  # another version's: `GET /runs/{id}/metrics` reports it
                continue
            self.meters.add(record, int(entry_id.partition("-")[0]) / 1000)
        return len(entries)
