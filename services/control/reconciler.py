"""Reconciler: drives every run from its actual to its desired state.

All state between passes is in Redis.

    preparing -> starting -> running <-> paused -> draining -> finished | stopped | failed
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from redis import exceptions as redis_errors

from offbeat.services.control.claims import claim_chosen
from offbeat.services.control.downloads import complete_record
from offbeat.services.control.failing_episodes import read_failing
from offbeat.services.control.interfaces import Component, Health, Observation, RunMesh
from offbeat.services.control.lost_records import LostRecords
from offbeat.services.control.reports import Reports
from offbeat.services.control.restart_policy import RestartPolicy
from offbeat.services.control.run import (
    DesiredState,
    ForeignRecordError,
    LostRecordError,
    Restarts,
    RunRecord,
    RunSpec,
    RunState,
    UnknownRunError,
)
from offbeat.services.control.server_watch import ServerWatch
from offbeat.services.control.store import RunStore
from offbeat.services.diagnosis import describe_untrained
from offbeat.services.errors import ControlError
from offbeat.services.log_format import set_task_log_fields
from offbeat.services.redis.errors import RedisReadOnlyError, find_outage

logger = logging.getLogger(__name__)

RECONCILE_TIMEOUT_S = 900.0
"""Limit of one pass over a run."""
OUTAGE_GRACE_S = 3.0
"""Time after an outage in which nothing counts as dead."""
STOPPED_STATES = (Health.ABSENT, Health.DEAD, Health.DONE)


class Reconciler:
    def __init__(
        self,
        store: RunStore,
        build_mesh: Callable[[RunRecord], RunMesh],
        *,
        reconcile_s: float = 0.5,
        policy: RestartPolicy | None = None,
        own_log: str = "logs/control.log",
        write_report: Callable[[RunRecord], Awaitable[None]] | None = None,
        complete: Callable[[RunRecord], Awaitable[RunSpec]] | None = None,
    ) -> None:
        """own_log: this process's log, absolute or relative to a run's folder. complete: validates a run after its
        downloads.
        """
        self._complete = complete
        self._reports = Reports(store, write_report)
        self._own_log = own_log
        self._store = store
        self._build_mesh = build_mesh
        self._reconcile_s = reconcile_s
        self._policy = policy or RestartPolicy()
        self._meshes: dict[tuple[str, float, str], RunMesh] = {}
        self._lost = LostRecords(store)
        self._foreign: set[str] = set()
        self._excused_starts: set[tuple[str, str]] = set()
        """Components whose last failed start was due to Redis."""
        self._outage_at = float("-inf")
        self._server = ServerWatch(store.redis)
        self.redis_trouble = ""
        """Error of a Redis that refuses writes."""
        self._wake = asyncio.Event()

    def tune(self, *, reconcile_s: float, policy: RestartPolicy) -> None:
        """Apply settings from the next pass on."""
        self._reconcile_s = reconcile_s
        self._policy = policy

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Reconcile active runs concurrently until cancelled."""
        tasks_by_run: dict[str, asyncio.Task[None]] = {}
        reporting: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                self._wake.clear()
                tasks_by_run = {run_id: task for run_id, task in tasks_by_run.items() if not task.done()}
                for run_id in await self._active_runs():
                    if run_id not in tasks_by_run:
                        tasks_by_run[run_id] = asyncio.create_task(
                            self._try_reconcile(run_id), name=f"reconcile {run_id}"
                        )
                reporting = {run_id: task for run_id, task in reporting.items() if not task.done()}
                for run_id in await self._reports.due():
                    if run_id not in reporting:
                        reporting[run_id] = asyncio.create_task(self._reports.write(run_id), name=f"report of {run_id}")
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._reconcile_s):
                        await self._wake.wait()
        finally:
            tasks = [*tasks_by_run.values(), *reporting.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _active_runs(self) -> list[str]:
        try:
            run_ids = await self._store.unfinished()
            if restored := await self._lost.put_back(run_ids):
                self._outage_at = time.monotonic()
                run_ids += restored
        except redis_errors.RedisError as error:
            self._note_outage(error)
            logger.warning("no run is reconciled: %s; retrying", error)
            return []
        self._meshes = {key: mesh for key, mesh in self._meshes.items() if key[0] in run_ids}
        return run_ids

    async def _try_reconcile(self, run_id: str) -> None:
        set_task_log_fields(run=run_id)
        try:
            async with asyncio.timeout(RECONCILE_TIMEOUT_S):
                await self.reconcile(run_id)
        except UnknownRunError:
            self._forget(run_id)
        except LostRecordError:  # the next pass restores it
            return
        except ForeignRecordError as error:
            if run_id not in self._foreign:
                self._foreign.add(run_id)
                logger.error("not reconciled: %s", error)
        except Exception as error:
            # A failed pass must not stop the loop: the next one starts from the state in Redis.
            if cause := find_outage(error):
                self._note_outage(cause)
                logger.warning("run %s is not reconciled: %s; retrying", run_id, error)
            else:
                logger.exception("reconciling run %s failed; retrying", run_id)

    def _note_outage(self, error: redis_errors.RedisError) -> None:
        self._outage_at = time.monotonic()
        self._excused_starts.clear()
        if isinstance(error, RedisReadOnlyError):  # one that does not answer can report nothing
            self.redis_trouble = str(error)

    async def reconcile(self, run_id: str) -> RunState:
        record = await self._store.load(run_id)
        if record.state.is_terminal or record.mesh != self._store.mesh:  # another one has started it meanwhile
            self._forget(run_id)
            return record.state
        await self._lost.note(record)
        try:
            mesh = self._mesh(record)
        except ForeignRecordError as error:
            if not record.is_ending:
                raise
            return await self._store.end_unreadable(record, str(error))
        if record.wanted.is_final and record.state is not RunState.DRAINING:
            return await self._start_draining(record, RunState.STOPPED)
        match record.state:
            case RunState.PREPARING:
                return await self._prepare(record, mesh)
            case RunState.DRAINING:
                return await self._drain(record, mesh)
            case _:
                return await self._maintain(record, mesh)

    def _forget(self, run_id: str) -> None:
        self._excused_starts = {key for key in self._excused_starts if key[0] != run_id}
        self._meshes = {key: mesh for key, mesh in self._meshes.items() if key[0] != run_id}

    def _mesh(self, record: RunRecord) -> RunMesh:
        key = (record.run_id, record.started_at, record.downloads)
        if key not in self._meshes:
            self._meshes[key] = self._build_mesh(record)
        return self._meshes[key]

    async def _prepare(self, record: RunRecord, mesh: RunMesh) -> RunState:
        if record.output_dir in self._store.reported:
            return record.state
        try:
            await mesh.prepare()
        except Exception as error:
            if find_outage(error):
                raise  # not the fault of the run: the next pass retries
            logger.exception("run %s: preparation failed", record.run_id)
            reason = f"preparation failed: {error}"
            return await self._start_draining(record, RunState.FAILED, reason, self._own_log, resumable=False)
        await self._store.update(record.run_id, state=RunState.STARTING)
        return await self._maintain(replace(record, state=RunState.STARTING), mesh)

    async def _maintain(self, record: RunRecord, mesh: RunMesh) -> RunState:
        """Start absent components, replace dead ones, detect the end of training."""
        await mesh.apply_settings(await self._store.settings(record), paused=record.wanted is DesiredState.PAUSED)
        observations = await self._observe(record, mesh.components)
        if await self._server.is_replaced():  # which may lack the newest heartbeats
            self._outage_at = time.monotonic()
        if time.monotonic() < self._outage_at + OUTAGE_GRACE_S:
            return record.state
        healths = {each.name: observations[each.name].health for each in mesh.components}
        if Health.DONE in healths.values():
            return await self._start_draining(record, RunState.FINISHED, await self._find_untrained(record))
        for component in mesh.components:
            observation = observations[component.name]
            if reason := await self._restart_if_down(record, component, observation):
                resumable = observation.health is not Health.BROKEN
                return await self._start_draining(record, RunState.FAILED, reason, observation.log, resumable=resumable)
        if reason := await self._find_broken_env(record):
            return await self._start_draining(record, RunState.FAILED, reason, resumable=False)
        if record.state is RunState.STARTING and any(health is not Health.READY for health in healths.values()):
            return record.state
        if record.downloads:
            return await self._complete_record(record)
        return await self._record_running(record)

    async def _complete_record(self, record: RunRecord) -> RunState:
        """Continue with the downloaded models, if the configuration fits them."""
        assert self._complete is not None, "a factory whose runs may wait for downloads"
        complete, claim = partial(self._complete, record), partial(complete_record, self._store, record)
        try:
            await claim_chosen(complete, claim)
        except ControlError as error:
            return await self._start_draining(record, RunState.FAILED, str(error), self._own_log, resumable=False)
        self.wake()
        return RunState.PREPARING

    async def _find_untrained(self, record: RunRecord) -> str:
        """Return why a finished run learned nothing."""
        learner = await self._store.components.learner(record.run_id)
        return "" if learner.has_trained else describe_untrained(learner.findings)

    async def _find_broken_env(self, record: RunRecord) -> str:
        """Return an error if every episode, or every comparison of a group, failed before the first step."""
        if (await self._store.components.progress(record.run_id)).step > 0:
            return ""
        reports = await self._store.components.reports(record.run_id)
        failing = read_failing(reports.workers.values(), since=record.started_at)
        return next((each.describe_all() for each in failing if each.all_failed), "")

    async def _record_running(self, record: RunRecord) -> RunState:
        state = RunState.PAUSED if record.wanted is DesiredState.PAUSED else RunState.RUNNING
        if state is not record.state:
            first = {} if record.running_at else {"running_at": self._store.clock()}
            await self._store.update(record.run_id, state=state, **first)
        return state

    async def _restart_if_down(self, record: RunRecord, component: Component, observation: Observation) -> str:
        """Start an absent or dead component; return why a restart can't help."""
        if observation.health is Health.BROKEN:
            return f"{component.name}: {observation.detail}"
        if observation.health is Health.DEAD:
            restarts = await self._count(record.run_id, component.name, observation)
            if restarts.count > self._policy.max_restarts:
                return f"{component.name} died {restarts.count} times without progress: {observation.detail}"
        elif observation.health is Health.ABSENT:
            last = await self._last_restarts(record.run_id, component.name)
            restarts = last if last.start_failed else Restarts()
        else:
            return ""
        if self._store.clock() < restarts.last_at + self._policy.delay_s(restarts.count):
            return ""
        key = record.run_id, component.name
        try:
            await component.ensure()
            self._excused_starts.discard(key)
        except Exception as error:
            if find_outage(error) and key not in self._excused_starts:
                self._excused_starts.add(key)  # if the component alone can not reach Redis, the next start fails, too
                logger.warning("run %s: starting %s failed: %s; retrying", *key, error)
                return ""
            logger.exception("run %s: starting %s failed", record.run_id, component.name)
            failure = replace(observation, detail=f"can't be started: {error}")
            restarts = await self._count(record.run_id, component.name, failure, start_failed=True)
            if restarts.count > self._policy.max_restarts:
                return f"{component.name} could not be started {restarts.count} times: {error}"
        return ""

    async def _last_restarts(self, run_id: str, component: str) -> Restarts:
        return (await self._store.components.restarts(run_id)).get(component, Restarts())

    async def _count(
        self, run_id: str, component: str, observation: Observation, *, start_failed: bool = False
    ) -> Restarts:
        """Count a death, once per incident, or a failed start."""
        before = await self._last_restarts(run_id, component)
        if observation.incident == before.incident and not start_failed:
            return before
        step = (await self._store.components.progress(run_id)).version
        count = before.count + 1 if step <= before.step else 1
        now = self._store.clock()
        restarts = Restarts(count, before.total + 1, now, observation.incident, step, False, start_failed)
        logger.warning("run %s: %s is dead (%s), restart %d", run_id, component, observation.detail, restarts.total)
        await self._store.components.set_restarts(run_id, component, restarts, observation.detail)
        return restarts

    async def _observe(self, record: RunRecord, components: Sequence[Component]) -> dict[str, Observation]:
        async def observe(component: Component) -> Observation:
            try:
                return await component.observe()
            except Exception as error:
                # An unknown state is no reason to replace it: the next pass observes it again.
                logger.warning("run %s: no state of %s: %s", record.run_id, component.name, error)
                return Observation(Health.STARTING, f"does not answer: {error}")

        results = await asyncio.gather(*(observe(component) for component in components))
        observations = {component.name: observation for component, observation in zip(components, results, strict=True)}
        await self._store.components.set_observations(record.run_id, observations)
        self.redis_trouble = ""
        return observations

    async def _start_draining(
        self, record: RunRecord, outcome: RunState, error: str = "", log: str = "", *, resumable: bool = True
    ) -> RunState:
        (logger.error if error else logger.info)("run %s is draining: %s %s", record.run_id, outcome, error)
        now = self._store.clock()
        await self._store.update(
            record.run_id,
            state=RunState.DRAINING,
            outcome=outcome,
            error=error,
            log=log,
            resumable=resumable,
            draining_at=now,
        )
        self.wake()
        return RunState.DRAINING

    async def _drain(self, record: RunRecord, mesh: RunMesh) -> RunState:
        """Stop the learner gracefully, then the others; clean up."""
        now = record.wanted is DesiredState.KILLED or record.outcome is not RunState.STOPPED
        if not now and (await self._store.components.learner(record.run_id)).is_saving:
            await self._store.update(record.run_id, draining_at=self._store.clock())  # its grace begins anew
        else:
            now = now or self._store.clock() > record.draining_at + self._policy.drain_timeout_s
        if not now:
            await mesh.drain()
        observations = await self._observe(record, mesh.components)
        remaining = [
            component for component in mesh.components if observations[component.name].health not in STOPPED_STATES
        ]
        if remaining:
            stopping = remaining if now or remaining[0] is not mesh.components[0] else remaining[:1]
            await asyncio.gather(*(component.stop(now=now) for component in stopping))
            return RunState.DRAINING
        await mesh.clean_up()
        report = self._reports.at_end
        await self._store.update(record.run_id, state=record.outcome, ended_at=self._store.clock(), report=report)
        self._reports.note_end()
        self.wake()
        logger.info("run %s is %s", record.run_id, record.outcome)
        return record.outcome
