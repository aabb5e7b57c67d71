"""Commands and questions about runs: plain Python over the store, so that a test builds it with fakes.

Invariant: a command changes what is wanted and wakes the reconciler; it never acts on a run itself.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from services.buffer.client import Counters
from services.control.records import RunRecord, RunSpec, RunStore, UnknownRunError, Wanted
from services.control.views import (
    CountersView,
    MetricsView,
    MetricView,
    ProblemView,
    RunView,
    component_views,
    finite,
    places,
)
from services.errors import ControlError
from services.telemetry import AsyncRedisMetrics

LEARNER = "learner"
NEWEST_LOOKED_AT = 50
"""Metric records searched, from the newest, for the learner's last one."""


class InvalidRunError(ControlError):
    """A run's configuration was refused."""

    def __init__(self, problems: Sequence[ProblemView]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(f"{problem.path}: {problem.message}" for problem in problems))


Validator = Callable[[str | dict[str, Any]], RunSpec]
"""A YAML text or a tree of plain values -> the run; raises `InvalidRunError` with every problem."""


class ControlService:
    """What the REST API offers."""

    def __init__(
        self,
        store: RunStore,
        validate: Validator,
        *,
        wake: Callable[[], None],
        counters: Callable[[str], Awaitable[Counters | None]],
    ) -> None:
        self._store = store
        self._validate = validate
        self._wake = wake
        self._counters = counters

    async def create(self, document: str | dict[str, Any], *, dry_run: bool = False) -> tuple[RunView | None, bool]:
        """Start a run; returns it, and whether it is new. `dry_run` validates alone.

        Raises:
            InvalidRunError: the configuration was refused.
            RunExistsError: a run of that name goes on with another configuration.
        """
        # In a thread: validation resets the run's envs once, which are the user's own code.
        spec = await asyncio.to_thread(self._validate, document)
        if dry_run:
            return None, False
        record, created = await self._store.create(spec)
        self._wake()
        return await self._view(record), created

    async def runs(self) -> list[RunView]:
        """Every run, newest first."""
        views: list[RunView] = []
        for run_id in reversed(await self._store.run_ids()):
            try:
                views.append(await self.view(run_id))
            except UnknownRunError:
                continue
        return views

    async def view(self, run_id: str) -> RunView:
        """One run. Raises `UnknownRunError`."""
        return await self._view(await self._store.load(run_id))

    async def stop(self, run_id: str, *, now: bool) -> RunView:
        """Drain, checkpoint and end a run, or end it at once. Raises `UnknownRunError`."""
        record = await self._store.want(run_id, Wanted.KILLED if now else Wanted.STOPPED)
        self._wake()
        return await self._view(record)

    async def metrics(self, run_id: str, after: str, limit: int) -> MetricsView:
        """Metric records that came after the id `after`. Raises `UnknownRunError`."""
        await self._store.load(run_id)
        entries = await AsyncRedisMetrics(self._store.redis, run_id).read(after, count=limit)
        records = [MetricView.of(entry_id, record) for entry_id, record in entries]
        return MetricsView(records=records, next=records[-1].id if records else after)

    async def healthy(self) -> bool:
        """Whether the state can be reached."""
        return bool(await self._store.redis.ping())  # pyright: ignore[reportGeneralTypeIssues]

    async def _view(self, record: RunRecord) -> RunView:
        run_id = record.run_id
        progress = await self._store.progress(run_id)
        seen = await self._store.observations(run_id)
        counters = await self._counters(run_id)
        return RunView(
            id=run_id,
            state=record.state,
            wanted=record.wanted,
            phase=await self._store.phase(run_id),
            error=record.error,
            log=record.log,
            step=progress.step,
            version=progress.version,
            max_steps=record.max_steps,
            attempt=record.attempt,
            created_at=record.created_at,
            started_at=record.started_at,
            running_at=record.running_at,
            ended_at=record.ended_at,
            components=component_views(
                {name: (each.health, each.detail) for name, each in seen.items()}, await self._store.restarts(run_id)
            ),
            counters=CountersView.of(counters) if counters else None,
            metrics=await self._learner_metrics(run_id),
            places=places(record),
        )

    async def _learner_metrics(self, run_id: str) -> dict[str, float | None]:
        for record in await self._store.newest_metrics(run_id, NEWEST_LOOKED_AT):
            if record.source == LEARNER:
                return {name: finite(partial.value) for name, partial in record.values.items()}
        return {}
