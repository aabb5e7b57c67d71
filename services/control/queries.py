"""REST views of a run, read from Redis."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from offbeat.services.buffer.api import GroupProgress, Quarantined, Snapshot
from offbeat.services.control.causes import Cause, RunSnapshot
from offbeat.services.control.explain import chain
from offbeat.services.control.failing_episodes import read_failing
from offbeat.services.control.rates import RunRates
from offbeat.services.control.run import ComponentReports, ForeignRecordError, LearnerReport, RunRecord, RunState
from offbeat.services.control.schemas import (
    ChangeView,
    CountersView,
    FindingView,
    RunView,
    SettingsView,
    StalenessView,
    component_views,
    finite,
    paths_view,
)
from offbeat.services.control.store import RunStore
from offbeat.services.errors import CodecError
from offbeat.services.findings import RunFinding
from offbeat.services.live_settings import Settings

TRAINING = (RunState.RUNNING, RunState.DRAINING)


@contextmanager
def reading(run_id: str) -> Iterator[None]:
    """Translate decoding errors to `ForeignRecordError`."""
    try:
        yield
    except CodecError as error:
        raise ForeignRecordError(f"run {run_id!r} was recorded by another version of Offbeat: {error}") from error


class BufferReader(Protocol):
    async def snapshot(self, run_id: str) -> Snapshot: ...

    async def groups(self, run_id: str) -> list[GroupProgress]: ...

    async def quarantine(self, run_id: str) -> list[Quarantined]: ...


class Overview:
    def __init__(self, store: RunStore, buffer: BufferReader, redis_trouble: Callable[[], str]) -> None:
        self._redis_trouble = redis_trouble
        self._store = store
        self._buffer = buffer
        self._rates = RunRates(store.components)

    async def view(self, record: RunRecord) -> RunView:
        """Build a run's view; raises `ForeignRecordError`."""
        with reading(record.run_id):
            return await self._view(record)

    async def _view(self, record: RunRecord) -> RunView:
        store, components, run_id = self._store, self._store.components, record.run_id
        progress, observations, restarts, reports = await asyncio.gather(
            components.progress(run_id),
            components.observations(run_id),
            components.restarts(run_id),
            components.reports(run_id),
        )
        snapshot, learner, changes = await asyncio.gather(
            self._buffer.snapshot(run_id),
            components.learner(run_id),
            store.recent_changes(run_id),
        )
        settings = changes.settings(record.settings)
        rates = await self._rates.view(record, learner, store.clock(), can_train=record.state in TRAINING)
        return RunView(
            id=run_id,
            state=record.state,
            wanted=record.wanted,
            phase=learner.phase or _download_phase(record),
            error=record.error,
            log=record.log,
            resumable=record.resumable,
            step=progress.step,
            version=progress.version,
            max_steps=record.max_steps,
            attempt=record.attempt,
            created_at=record.created_at,
            started_at=record.started_at,
            running_at=record.running_at,
            ended_at=record.ended_at,
            components=component_views(
                {name: (each.health, each.detail) for name, each in observations.items()}, restarts
            ),
            counters=CountersView.of(snapshot.counters),
            quarantined=snapshot.quarantined,
            staleness=_staleness(learner, settings),
            rates=rates,
            settings=SettingsView.of(settings),
            changes=[ChangeView.of(change) for change in changes.newest],
            metrics={name: finite(value) for name, value in learner.metrics.items()},
            diagnosis=[FindingView.of(finding) for finding in _findings(record, learner, reports)],
            paths=paths_view(record),
        )

    async def why(self, record: RunRecord) -> list[Cause]:
        """Explain the run's wait; raises `ForeignRecordError`."""
        with reading(record.run_id):
            return chain(await self._snapshot(record))

    async def _snapshot(self, record: RunRecord) -> RunSnapshot:
        store, components, run_id = self._store, self._store.components, record.run_id
        observations, learner, progress, reports = await asyncio.gather(
            components.observations(run_id),
            components.learner(run_id),
            components.progress(run_id),
            components.reports(run_id),
        )
        snapshot, groups = await asyncio.gather(self._buffer.snapshot(run_id), self._buffer.groups(run_id))
        return RunSnapshot(
            now=store.clock(),
            record=record,
            observations=observations,
            learner=learner,
            buffer=snapshot,
            groups=groups,
            workers=reports.workers,
            replicas=reports.replicas,
            version=progress.version,
            leased=reports.leased,
            redis_trouble=self._redis_trouble(),
        )


def _download_phase(record: RunRecord) -> str:
    is_waiting = record.downloads and not record.state.is_terminal
    return f"downloading {' and '.join(record.downloads.split())}" if is_waiting else ""


def _findings(record: RunRecord, learner: LearnerReport, reports: ComponentReports) -> list[RunFinding]:
    failing = [] if record.state.is_terminal else read_failing(reports.workers.values(), since=record.started_at)
    return [*(finding for each in failing if (finding := each.finding) is not None), *learner.findings]


def _staleness(learner: LearnerReport, settings: Settings) -> StalenessView:
    mean, highest = learner.metrics.get("staleness"), learner.metrics.get("staleness_max")
    return StalenessView(mean=mean, max=highest, bound=settings.max_staleness)
