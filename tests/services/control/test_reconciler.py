import asyncio
import json
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from offbeat.services.control.interfaces import Health
from offbeat.services.control.reconciler import Reconciler, RestartPolicy
from offbeat.services.control.run import (
    DesiredState,
    RunState,
)
from offbeat.services.control.store import RunStore
from offbeat.services.diagnosis import encode_findings
from offbeat.services.findings import RunFinding
from offbeat.services.keys import RunKeys
from tests.copying import replace
from tests.services.control.control_fakes import SETTINGS, FakeClock, FakeMesh, reconcile_until
from tests.waiting import wait_until


async def test_a_run_is_prepared_then_started_then_running(reconciler: Reconciler, mesh: FakeMesh):
    assert await reconciler.reconcile("lake") is RunState.STARTING
    assert mesh.prepared == 1
    assert await reconciler.reconcile("lake") is RunState.RUNNING
    assert [component.starts for component in mesh.components] == [1, 1, 1]


async def test_a_pass_that_hangs_times_out_and_the_next_one_continues(
    store: RunStore, mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("offbeat.services.control.reconciler.RECONCILE_TIMEOUT_S", 0.3)
    reconciler = Reconciler(store, lambda _: mesh, reconcile_s=0.05)
    hung, ensure = asyncio.Event(), mesh.components[0].ensure

    async def hang() -> None:
        mesh.components[0].ensure = ensure
        hung.set()
        await asyncio.Event().wait()

    mesh.components[0].ensure = hang
    running = asyncio.create_task(reconciler.run())
    await hung.wait()
    await wait_until(lambda: mesh.components[0].starts == 1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_reconciling_again_changes_nothing_that_is_right(reconciler: Reconciler, mesh: FakeMesh):
    await reconcile_until(reconciler, RunState.RUNNING, passes=20)
    assert mesh.prepared == 1
    assert [component.starts for component in mesh.components] == [1, 1, 1]


async def test_the_run_finishes_when_the_learner_has_done_its_work(
    reconciler: Reconciler, mesh: FakeMesh, store: RunStore
):
    await reconcile_until(reconciler, RunState.RUNNING)
    mesh["learner"].health = Health.DONE
    assert await reconciler.reconcile("lake") is RunState.DRAINING
    await reconcile_until(reconciler, RunState.FINISHED)
    assert mesh["learner"].stops == []
    assert mesh["generation"].stops == [True]
    assert mesh.cleaned == 1
    assert (await store.load("lake")).ended_at > 0


async def test_a_run_without_a_gradient_finishes_with_what_was_wrong(
    reconciler: Reconciler, mesh: FakeMesh, store: RunStore
):
    await reconcile_until(reconciler, RunState.RUNNING)
    found = RunFinding("truncated", "a token limit cut 90% of the episodes", "raise it", ("sequence_length",))
    fields = {"learner_has_trained": "0", "learner_findings": encode_findings([found])}
    await cast(Any, store.redis.hset(RunKeys("lake").record, mapping=fields))
    mesh["learner"].health = Health.DONE
    await reconcile_until(reconciler, RunState.FINISHED)
    assert (await store.load("lake")).error == f"no token was trained: {found}"


@pytest.mark.parametrize("name", ["learner", "env-workers", "generation"])
async def test_a_dead_component_is_replaced_at_once(reconciler: Reconciler, mesh: FakeMesh, name: str):
    await reconcile_until(reconciler, RunState.RUNNING)
    mesh[name].die()
    assert await reconciler.reconcile("lake") is RunState.RUNNING
    assert mesh[name].health is Health.READY
    assert mesh[name].starts == 2


async def test_a_component_that_keeps_dying_is_given_more_and_more_time(
    reconciler: Reconciler, mesh: FakeMesh, clock: FakeClock
):
    await reconcile_until(reconciler, RunState.RUNNING)
    for delay in (0.0, 1.0, 2.0):
        mesh["learner"].die()
        before = mesh["learner"].starts
        if delay:
            await reconciler.reconcile("lake")
            clock.now += delay - 0.1
            await reconciler.reconcile("lake")
            assert mesh["learner"].starts == before
            clock.now += 0.2
        await reconciler.reconcile("lake")
        assert mesh["learner"].starts == before + 1


async def test_one_death_counts_once_however_often_it_is_seen(reconciler: Reconciler, mesh: FakeMesh, store: RunStore):
    await reconcile_until(reconciler, RunState.RUNNING)
    mesh["learner"].die()
    await reconciler.reconcile("lake")
    mesh["learner"].die()
    for _ in range(5):
        await reconciler.reconcile("lake")
    assert (await store.components.restarts("lake"))["learner"].count == 2


async def test_a_component_that_always_dies_fails_the_run_with_cause_and_log(
    reconciler: Reconciler, mesh: FakeMesh, store: RunStore, clock: FakeClock
):
    mesh["learner"].stays_dead = True
    for _ in range(12):
        clock.now += 100.0
        await reconciler.reconcile("lake")
    record = await store.load("lake")
    assert record.state is RunState.FAILED
    assert record.error == "learner died 4 times without progress: it always does"
    assert (record.log, record.resumable) == ("logs/learner.log", True)
    assert all(component.health is not Health.READY for component in mesh.components)


async def test_a_run_that_gets_further_between_deaths_is_restarted_without_limit(
    reconciler: Reconciler, mesh: FakeMesh, async_redis: Redis, clock: FakeClock
):
    await reconcile_until(reconciler, RunState.RUNNING)
    for step in range(20):
        await async_redis.hset(RunKeys("lake").progress, mapping={"version": step, "step": step})
        clock.now += 100.0
        await reconciler.reconcile("lake")
        mesh["learner"].die()
    await reconciler.reconcile("lake")
    assert await reconciler.reconcile("lake") is RunState.RUNNING


async def test_a_component_that_cannot_be_started_fails_the_run(
    reconciler: Reconciler, mesh: FakeMesh, store: RunStore, clock: FakeClock
):
    mesh["generation"].start_error = RuntimeError("no GPU left")
    for _ in range(12):
        clock.now += 100.0
        await reconciler.reconcile("lake")
    record = await store.load("lake")
    assert record.state is RunState.FAILED
    assert "generation could not be started 4 times: no GPU left" in record.error


async def test_a_component_that_cannot_be_started_is_given_more_and_more_time(
    reconciler: Reconciler, mesh: FakeMesh, store: RunStore, clock: FakeClock
):
    mesh["generation"].start_error = RuntimeError("no GPU left")
    for seconds, count in ((0.1, 1), (0.1, 2), (0.9, 2), (0.2, 3), (1.9, 3), (0.2, 4)):
        clock.now += seconds
        await reconciler.reconcile("lake")
        assert (await store.components.restarts("lake"))["generation"].count == count
    assert (await store.load("lake")).state is RunState.DRAINING


async def test_a_dead_component_that_cannot_be_started_is_counted_once_for_each_start(
    reconciler: Reconciler, mesh: FakeMesh, store: RunStore, clock: FakeClock, caplog: pytest.LogCaptureFixture
):
    await reconcile_until(reconciler, RunState.RUNNING)
    mesh["generation"].die()
    mesh["generation"].start_error = RuntimeError("no GPU left")
    for starts in (1, 2, 3):
        clock.now += 100.0
        await reconciler.reconcile("lake")
        assert caplog.text.count("starting generation failed") == starts
        assert (await store.components.restarts("lake"))["generation"].count == 1 + starts


async def test_what_a_restart_cannot_mend_fails_the_run_at_once(
    reconciler: Reconciler, mesh: FakeMesh, store: RunStore
):
    await reconcile_until(reconciler, RunState.RUNNING)
    mesh["learner"].health, mesh["learner"].detail = Health.BROKEN, "the configuration does not fit the checkpoint"
    await reconcile_until(reconciler, RunState.FAILED)
    record = await store.load("lake")
    assert record.error == "learner: the configuration does not fit the checkpoint"
    assert not record.resumable


async def test_a_failed_preparation_fails_the_run_with_its_cause(
    reconciler: Reconciler, mesh: FakeMesh, store: RunStore
):
    mesh.prepare_error = OSError("disk full")
    await reconcile_until(reconciler, RunState.FAILED)
    record = await store.load("lake")
    assert "disk full" in record.error
    assert not record.resumable


def report_of(finished: int, failed: int, at: float, limit: int = 16, counted: str = "episodes") -> str:
    episodes = {"finished": finished, "failed": failed, "recent": finished + failed, "recent_failed": failed}
    last = {"limit": limit, "tag": "Hills", "error": "step_error: no slope", "trace": "Traceback\n  in step"}
    return json.dumps({"at": at, "groups": {}, "evaluations": {}, counted: {**episodes, **last}})


async def test_a_run_whose_every_episode_fails_ends_with_the_traceback(
    reconciler: Reconciler, store: RunStore, clock: FakeClock
):
    await reconcile_until(reconciler, RunState.RUNNING)
    doing = RunKeys("lake").doing
    await store.redis.hset(doing, mapping={"w0": report_of(0, 9, clock()), "w1": report_of(0, 6, clock())})
    await reconcile_until(reconciler, RunState.RUNNING, passes=2)
    await store.redis.hset(doing, "w1", report_of(0, 7, clock()))
    await reconcile_until(reconciler, RunState.FAILED)
    record = await store.load("lake")
    assert record.error.startswith("all of the first 16 episodes failed: step_error: no slope\n")
    assert "custom_envs.Hills" in record.error
    assert record.error.endswith("Traceback\n  in step")
    assert not record.resumable


async def test_a_run_whose_every_groups_rewards_fail_ends(reconciler: Reconciler, store: RunStore, clock: FakeClock):
    await reconcile_until(reconciler, RunState.RUNNING)
    report = {
        **json.loads(report_of(480, 0, clock())),
        **json.loads(report_of(0, 16, clock(), counted="comparisons")),
    }
    await store.redis.hset(RunKeys("lake").doing, "w0", json.dumps(report))
    await reconcile_until(reconciler, RunState.FAILED)
    record = await store.load("lake")
    assert record.error.startswith("all of the first 16 comparisons of groups failed: step_error: no slope\n")
    assert not record.resumable


@pytest.mark.parametrize(("finished", "step", "age_s"), [(1, -1, 0.0), (0, 3, 0.0), (0, -1, 60.0)])
async def test_failures_end_no_run_that_has_worked(
    reconciler: Reconciler, store: RunStore, clock: FakeClock, finished: int, step: int, age_s: float
):
    """Nor do those that a worker reported before the run was started again."""
    await reconcile_until(reconciler, RunState.RUNNING)
    await store.redis.hset(RunKeys("lake").progress, mapping={"version": step, "step": step})
    await store.redis.hset(RunKeys("lake").doing, "w0", report_of(finished, 99, clock() - age_s))
    await reconcile_until(reconciler, RunState.RUNNING, passes=3)


async def test_a_graceful_stop_drains_and_stops_the_learner_before_the_others(
    reconciler: Reconciler, mesh: FakeMesh, store: RunStore
):
    await reconcile_until(reconciler, RunState.RUNNING)
    mesh["learner"].stops_at_once = False
    await store.want("lake", DesiredState.STOPPED)
    await reconcile_until(reconciler, RunState.DRAINING, passes=4)
    assert mesh.drained > 0
    assert set(mesh["learner"].stops) == {False}
    assert mesh["generation"].stops == []
    mesh["learner"].health = Health.ABSENT
    await reconcile_until(reconciler, RunState.STOPPED)
    assert mesh["generation"].stops == [False]


async def test_a_graceful_stop_that_takes_too_long_continues_without_grace(
    reconciler: Reconciler, mesh: FakeMesh, store: RunStore, clock: FakeClock
):
    await reconcile_until(reconciler, RunState.RUNNING)
    mesh["learner"].stops_at_once = False
    await store.want("lake", DesiredState.STOPPED)
    await reconcile_until(reconciler, RunState.DRAINING, passes=3)
    clock.now += RestartPolicy().drain_timeout_s + 1
    await reconcile_until(reconciler, RunState.STOPPED)
    assert mesh["learner"].stops[-1] is True


async def test_a_graceful_stop_waits_for_a_checkpoint_that_is_being_written(
    reconciler: Reconciler, mesh: FakeMesh, store: RunStore, clock: FakeClock, async_redis: Redis
):
    await reconcile_until(reconciler, RunState.RUNNING)
    mesh["learner"].stops_at_once = False
    await store.want("lake", DesiredState.STOPPED)
    await async_redis.hset(RunKeys("lake").record, "learner_doing", json.dumps({"stage": "checkpoint", "step": 1}))
    await reconcile_until(reconciler, RunState.DRAINING, passes=3)
    clock.now += RestartPolicy().drain_timeout_s + 1
    await reconcile_until(reconciler, RunState.DRAINING, passes=3)
    assert set(mesh["learner"].stops) == {False}
    await async_redis.hset(RunKeys("lake").record, "learner_doing", json.dumps({"stage": "ending", "step": 1}))
    await reconcile_until(reconciler, RunState.DRAINING, passes=3)
    clock.now += RestartPolicy().drain_timeout_s + 1
    await reconcile_until(reconciler, RunState.STOPPED)
    assert mesh["learner"].stops[-1] is True


@pytest.mark.parametrize("passes", [0, 1, 2])
async def test_stopping_now_works_from_any_state(reconciler: Reconciler, mesh: FakeMesh, store: RunStore, passes: int):
    for _ in range(passes):
        await reconciler.reconcile("lake")
    await store.want("lake", DesiredState.KILLED)
    await reconcile_until(reconciler, RunState.STOPPED)
    assert all(component.health is Health.ABSENT for component in mesh.components)


async def test_a_paused_run_keeps_its_processes_and_continues_when_resumed(
    reconciler: Reconciler, mesh: FakeMesh, store: RunStore, clock: FakeClock
):
    await reconcile_until(reconciler, RunState.RUNNING)
    running_at = (await store.load("lake")).running_at
    await store.want("lake", DesiredState.PAUSED)
    assert await reconciler.reconcile("lake") is RunState.PAUSED
    assert mesh.steered[-1] == (SETTINGS, True)
    mesh["env-workers"].die()
    assert await reconciler.reconcile("lake") is RunState.PAUSED
    assert mesh["env-workers"].health is Health.READY, "what dies meanwhile is replaced"
    clock.now += 10
    await store.want("lake", DesiredState.RUNNING)
    assert await reconciler.reconcile("lake") is RunState.RUNNING
    assert mesh.steered[-1] == (SETTINGS, False)
    assert (await store.load("lake")).running_at == running_at
    assert [component.stops for component in mesh.components] == [[], [], []]


async def test_a_run_paused_before_it_runs_comes_up_paused(reconciler: Reconciler, mesh: FakeMesh, store: RunStore):
    await store.want("lake", DesiredState.PAUSED)
    assert await reconciler.reconcile("lake") is RunState.STARTING
    assert await reconciler.reconcile("lake") is RunState.PAUSED
    assert {paused for _, paused in mesh.steered} == {True}


async def test_a_paused_run_can_be_stopped(reconciler: Reconciler, store: RunStore):
    await store.want("lake", DesiredState.PAUSED)
    await reconcile_until(reconciler, RunState.PAUSED)
    await store.want("lake", DesiredState.STOPPED)
    await reconcile_until(reconciler, RunState.STOPPED)


async def test_process_counts_apply_as_soon_as_they_are_requested(
    reconciler: Reconciler, mesh: FakeMesh, store: RunStore
):
    await reconcile_until(reconciler, RunState.RUNNING)
    await store.change("lake", {"num_workers": 3, "learning_rate": 0.5})
    await reconciler.reconcile("lake")
    assert mesh.steered[-1] == (replace(SETTINGS, num_workers=3), False)
    successor = Reconciler(store, lambda _: mesh)
    await successor.reconcile("lake")
    assert mesh.steered[-1][0].num_workers == 3


async def test_a_new_control_replica_continues_where_the_old_one_died(
    reconciler: Reconciler, mesh: FakeMesh, store: RunStore
):
    await reconcile_until(reconciler, RunState.RUNNING)
    mesh["env-workers"].die()
    successor = Reconciler(store, lambda _: mesh)
    assert await successor.reconcile("lake") is RunState.RUNNING
    assert mesh["env-workers"].starts == 2
    assert [mesh["learner"].starts, mesh["generation"].starts] == [1, 1]


async def test_a_component_without_an_observation_is_left_alone(reconciler: Reconciler, mesh: FakeMesh):
    await reconcile_until(reconciler, RunState.RUNNING)

    async def silent() -> None:
        raise TimeoutError("no answer")

    observe = mesh["generation"].observe
    mesh["generation"].observe = silent  # pyright: ignore[reportAttributeAccessIssue]
    assert await reconciler.reconcile("lake") is RunState.RUNNING
    mesh["generation"].observe = observe
    assert await reconciler.reconcile("lake") is RunState.RUNNING
    assert mesh["generation"].starts == 1
