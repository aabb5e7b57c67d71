"""All current runs, and open models of Tinker servers, in Prometheus' text format."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as ExposedMetric
from prometheus_client.registry import Collector
from redis.exceptions import RedisError

from offbeat.services.control.prometheus.families import Family, FamilySample, FamilyType
from offbeat.services.control.prometheus.meters import MeterReader
from offbeat.services.control.prometheus.run_state import (
    LEFT_OUT,
    REDIS_REFUSES,
    REDIS_UP,
    ExportedRun,
    state_samples,
)
from offbeat.services.control.queries import BufferReader
from offbeat.services.control.run import ForeignRecordError, LostRecordError, RunRecord, UnknownRunError
from offbeat.services.control.store import RunStore
from offbeat.services.errors import CodecError, RetryableError
from offbeat.services.tinker.api import MODEL_FAMILIES, read_open_models

TINKER_FAMILIES = {value: Family(name, FamilyType.GAUGE, text) for value, (name, text) in MODEL_FAMILIES.items()}
ENDED_KEPT_S = 600.0
"""Time that an ended run is exported."""


class PrometheusExporter:
    def __init__(self, store: RunStore, buffer: BufferReader, redis_trouble: Callable[[], str]) -> None:
        self._store = store
        self._buffer = buffer
        self._redis_trouble = redis_trouble
        self._readers: dict[tuple[str, str], MeterReader] = {}
        self._reading = asyncio.Lock()

    async def export(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics, and their media type by the scraper's `Accept` header."""
        families = Families()
        families.add(FamilySample(REDIS_REFUSES, float(bool(self._redis_trouble()))))
        try:
            runs = await self._runs()
            models = await read_open_models(self._store.redis)
        except* (RedisError, RetryableError):
            families.add(FamilySample(REDIS_UP, 0.0))
        else:
            families.add(FamilySample(REDIS_UP, 1.0))
            for run_id, samples in runs:
                families.add_all(run_id, samples)
            for server, model_id, values in models:
                for name, value in values.items():
                    labels = {"server": server, "model": model_id}
                    families.add(FamilySample(TINKER_FAMILIES[name], value, labels))
        encode, media_type = _choose_encoder(accept)
        return encode(families.registry()), media_type

    async def _runs(self) -> list[tuple[str, list[FamilySample]]]:
        run_ids = await self._store.current(ended_after=self._store.clock() - ENDED_KEPT_S)
        async with self._reading:
            async with asyncio.TaskGroup() as group:  # no reader is used after the lock, when a run fails
                exports = [group.create_task(self._export_run(run_id)) for run_id in run_ids]
            self._readers = {key: reader for key, reader in self._readers.items() if key[0] in run_ids}
        return [exported for export in exports if (exported := export.result()) is not None]

    async def _export_run(self, run_id: str) -> tuple[str, list[FamilySample]] | None:
        """Return None for a run without a readable record."""
        try:
            record = await self._store.load(run_id)
            run = await self._read(record)
        except (UnknownRunError, LostRecordError, ForeignRecordError, CodecError):
            return None
        samples = list(state_samples(run))
        if not record.state.is_terminal:
            reader = self._readers.setdefault((run_id, record.uid), MeterReader(self._store.redis, run_id))
            await reader.read()
            samples += reader.meters.samples(run.now)
            samples.append(FamilySample(LEFT_OUT, reader.meters.num_left_out))
        return run_id, samples

    async def _read(self, record: RunRecord) -> ExportedRun:
        store, components, run_id = self._store, self._store.components, record.run_id
        progress, observations, restarts, reports = await asyncio.gather(
            components.progress(run_id),
            components.observations(run_id),
            components.restarts(run_id),
            components.reports(run_id),
        )
        learner, buffer, changes = await asyncio.gather(
            components.learner(run_id), self._buffer.snapshot(run_id), store.recent_changes(run_id)
        )
        settings = changes.settings(record.settings)
        return ExportedRun(store.clock(), record, progress, observations, restarts, reports, learner, buffer, settings)


class Families:
    """Samples of several runs by family."""

    def __init__(self) -> None:
        self._metrics: dict[str, ExposedMetric] = {}

    def add_all(self, run_id: str, samples: Iterable[FamilySample]) -> None:
        for sample in samples:
            self.add(sample._replace(labels={"run": run_id, **sample.labels}))

    def add(self, sample: FamilySample) -> None:
        family = sample.family
        metric = self._metrics.get(family.name)
        if metric is None:
            metric = self._metrics[family.name] = ExposedMetric(family.name, family.help, family.type.value)
        if metric.type == family.type.value:
            metric.add_sample(family.name + sample.suffix, dict(sample.labels), sample.value)

    def registry(self) -> CollectorRegistry:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(cast(Any, _Collected(self._metrics.values())))
        return registry


class _Collected(Collector):
    def __init__(self, metrics: Iterable[ExposedMetric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[ExposedMetric]:
        yield from self._metrics


def _choose_encoder(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """Choose by an `Accept` header, or text if it is malformed."""
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):  # of a version that is no number
        return choose_encoder("")
