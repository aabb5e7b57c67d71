"""Reports of runs that have ended."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.exceptions import ConnectionError

from offbeat.services.control.interfaces import Health
from offbeat.services.control.reconciler import Reconciler
from offbeat.services.control.reports import Reports
from offbeat.services.control.restart_policy import RestartPolicy
from offbeat.services.control.run import (
    BusyError,
    DesiredState,
    RunRecord,
    RunState,
)
from offbeat.services.control.service import ControlService
from offbeat.services.control.store import RunStore
from tests.copying import replace
from tests.services.control.api_harness import FakeRunFactory
from tests.services.control.control_fakes import SPEC, FakeMesh
from tests.waiting import wait_until


class ReportWriter:
    """Records the runs whose report is written; fails or hangs on request."""

    def __init__(self) -> None:
        self.written: list[tuple[str, RunState]] = []
        self.errors: list[Exception] = []
        self.hangs = False
        self.may_end = asyncio.Event()

    async def __call__(self, record: RunRecord) -> None:
        self.written.append((record.run_id, record.state))
        if self.hangs:
            await self.may_end.wait()
        if self.errors:
            raise self.errors.pop()


@asynccontextmanager
async def reconciling(store: RunStore, mesh: FakeMesh, writer: ReportWriter) -> AsyncIterator[None]:
    policy = RestartPolicy(max_restarts=0)
    reconciler = Reconciler(store, lambda _: mesh, reconcile_s=0.01, policy=policy, write_report=writer)
    running = asyncio.create_task(reconciler.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def report_is(store: RunStore, report: str) -> None:
    async def reached() -> bool:
        return (await store.load("lake")).report == report

    await wait_until(reached)


async def state_is(store: RunStore, state: RunState) -> None:
    async def reached() -> bool:
        return (await store.load("lake")).state is state

    await wait_until(reached)


@pytest.mark.parametrize("outcome", [RunState.FINISHED, RunState.STOPPED, RunState.FAILED])
async def test_a_report_is_written_once_when_a_run_ends(store: RunStore, mesh: FakeMesh, outcome: RunState):
    writer = ReportWriter()
    async with reconciling(store, mesh, writer):
        await state_is(store, RunState.RUNNING)
        match outcome:
            case RunState.FINISHED:
                mesh["learner"].health = Health.DONE
            case RunState.STOPPED:
                await store.want("lake", DesiredState.STOPPED)
            case _:
                mesh["learner"].health = Health.BROKEN
        await report_is(store, "written")
    async with reconciling(store, mesh, writer):
        await asyncio.sleep(0.1)
    assert writer.written == [("lake", outcome)]


async def test_a_replaced_service_leaves_the_report_to_its_successor(store: RunStore, mesh: FakeMesh):
    writer = ReportWriter()
    writer.hangs = True
    mesh["learner"].health = Health.DONE
    async with reconciling(store, mesh, writer):
        await wait_until(lambda: bool(writer.written))
    assert (await store.load("lake")).report == "due"
    writer.hangs = False
    async with reconciling(store, mesh, writer):
        await report_is(store, "written")
    assert len(writer.written) == 2


async def test_a_report_that_hangs_blocks_no_other_run(store: RunStore, mesh: FakeMesh):
    writer = ReportWriter()
    writer.hangs = True
    mesh["learner"].health = Health.DONE
    async with reconciling(store, mesh, writer):
        await wait_until(lambda: bool(writer.written))
        mesh["learner"].health = Health.ABSENT
        await store.create(replace(SPEC, run_id="lake-2", output_dir="/tmp/lake-2"))

        async def runs() -> bool:
            return (await store.load("lake-2")).state is RunState.RUNNING

        await wait_until(runs)


async def test_a_report_that_fails_keeps_no_run_from_ending(
    store: RunStore, mesh: FakeMesh, caplog: pytest.LogCaptureFixture
):
    writer = ReportWriter()
    writer.errors = [RuntimeError("no space left; write it with `offbeat report /tmp/lake`")]
    mesh["learner"].health = Health.DONE
    async with reconciling(store, mesh, writer):
        await report_is(store, "failed")
        assert (await store.load("lake")).state is RunState.FINISHED
    assert "offbeat report /tmp/lake" in caplog.text
    assert len(writer.written) == 1


async def test_a_report_waits_for_redis(store: RunStore, mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offbeat.services.control.reports.RETRY_S", 0.01)
    writer = ReportWriter()
    writer.errors = [ConnectionError("gone")]
    mesh["learner"].health = Health.DONE
    async with reconciling(store, mesh, writer):
        await report_is(store, "written")
    assert len(writer.written) == 2


async def test_a_run_started_again_forgets_the_report_of_its_last_attempt(store: RunStore, mesh: FakeMesh):
    mesh["learner"].health = Health.DONE
    writer = ReportWriter()
    writer.hangs = True
    async with reconciling(store, mesh, writer):
        await wait_until(lambda: bool(writer.written))
    ended = await store.load("lake")
    mesh["learner"].health = Health.ABSENT
    await store.create(replace(SPEC, resume=True))
    await store.close_report(ended, "written")
    assert (await store.load("lake")).report == ""
    assert await store.reports_due() == []


async def test_a_start_waits_for_the_report_that_is_written_into_its_folder(store: RunStore, mesh: FakeMesh):
    """It would move the folder away under the report, which would come into the new one."""
    writer = ReportWriter()
    writer.hangs = True
    mesh["learner"].health = Health.DONE
    async with reconciling(store, mesh, writer):
        await wait_until(lambda: bool(writer.written))
        mesh["learner"].health = Health.ABSENT
        service = ControlService(store, FakeRunFactory(store.redis), wake=lambda: None)
        with pytest.raises(BusyError, match="the report of run 'lake' is being written into /tmp/lake: try again"):
            await service.delete("lake", files=True)
        await store.create(SPEC)
        reconciler = Reconciler(store, lambda _: mesh)
        assert await reconciler.reconcile("lake") is RunState.PREPARING
        assert mesh.prepared == 1
        writer.may_end.set()
        await state_is(store, RunState.RUNNING)
    assert (mesh.prepared, len(writer.written)) == (2, 1)


async def test_a_report_that_was_due_is_not_written_of_the_next_run(store: RunStore):
    """It waits for another run's report, while its own run is started again."""
    writer = ReportWriter()
    reports = Reports(store, writer)
    await store.update("lake", state=RunState.STOPPED, report="due")
    assert await reports.due() == ["lake"]
    await store.create(SPEC)
    await reports.write("lake")
    assert writer.written == []
