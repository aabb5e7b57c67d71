import asyncio
import json
import math
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from offbeat.services.control.interfaces import Health, Observation
from offbeat.services.control.run import (
    BusyError,
    DesiredState,
    ForeignRecordError,
    Restarts,
    RunExistsError,
    RunRecord,
    RunSpec,
    RunState,
    RunStateError,
    UnknownRunError,
)
from offbeat.services.control.store import EPOCH_TTL_S, ORPHANED_AFTER_S, REPORT_DUE, RunStore
from offbeat.services.keys import RunKeys
from offbeat.services.redis.connection import connect
from tests.copying import replace
from tests.services.control.control_fakes import SETTINGS, FakeClock

SPEC = RunSpec("lake", '{"max_steps": 3}', "/tmp/lake", 3, SETTINGS)
OTHER = replace(SPEC, config='{"max_steps": 4}', max_steps=4)


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[RunStore]:
    async with Redis.from_url(redis_url) as client:
        yield RunStore(client, FakeClock())


def clock_of(store: RunStore) -> FakeClock:
    assert isinstance(store.clock, FakeClock)
    return store.clock


async def test_a_record_comes_back_as_it_was_written(store: RunStore):
    created, new = await store.create(SPEC)
    assert new
    assert await store.load("lake") == created
    assert await store.run_ids() == ["lake"]


def test_every_field_survives_redis():
    record = RunRecord(
        "r",
        "{}",
        "/x",
        7,
        SETTINGS,
        wanted=DesiredState.KILLED,
        state=RunState.DRAINING,
        outcome=RunState.FAILED,
        error="why",
        log="log",
        attempt=3,
        created_at=1.5,
        started_at=2.5,
        running_at=3.5,
        draining_at=4.5,
        ended_at=5.5,
        beat=6.5,
        report="written",
    )
    assert RunRecord.decode({k.encode(): v.encode() for k, v in record.encode().items()}) == record


async def test_a_record_of_another_version_is_refused_with_what_helps(store: RunStore):
    await store.create(SPEC)
    await store.redis.hdel(RunKeys("lake").record, "settings")  # pyright: ignore[reportGeneralTypeIssues]
    with pytest.raises(ForeignRecordError, match=r"no settings\): move /tmp/lake/redis aside"):
        await store.load("lake")


async def test_creating_the_same_run_again_changes_nothing(store: RunStore):
    first, _ = await store.create(SPEC)
    again, new = await store.create(SPEC)
    assert (again, new) == (first, False)


async def test_an_active_run_is_not_replaced_by_another_of_its_name(store: RunStore):
    await store.create(SPEC)
    with pytest.raises(RunExistsError, match="'lake' is preparing"):
        await store.create(OTHER)


async def test_a_run_without_a_reconciler_is_replaced(store: RunStore):
    await store.create(SPEC)
    clock_of(store).now += ORPHANED_AFTER_S + 1
    record, new = await store.create(OTHER)
    assert new
    assert record.config == OTHER.config


async def test_a_run_that_is_looked_after_is_not_taken_for_an_orphan(store: RunStore):
    await store.create(SPEC)
    clock_of(store).now += ORPHANED_AFTER_S + 1
    await store.components.set_observations("lake", {"learner": Observation(Health.READY)})
    with pytest.raises(RunExistsError):
        await store.create(OTHER)
    _, new = await store.create(OTHER, takeover=True)
    assert new


async def test_a_control_service_orphans_no_run_after_a_long_absence(store: RunStore):
    await store.create(replace(SPEC, claims={"app": "generation-local"}))
    clock_of(store).now += 100 * ORPHANED_AFTER_S
    control = replace(store, orphaned_after_s=math.inf)
    with pytest.raises(BusyError, match="'generation-local' is in use by run 'lake'"):
        await control.create(replace(OTHER, run_id="other", claims={"app": "generation-local"}))
    with pytest.raises(RunExistsError):
        await control.create(OTHER)
    assert await control.create(replace(SPEC, claims={"app": "generation-local"})) == (await store.load("lake"), False)


async def test_a_run_of_another_mesh_is_left_to_it_until_it_is_silent(store: RunStore):
    """Of two commands on one Redis, or of a command on that of a deployed mesh."""
    theirs = replace(store, mesh="theirs")
    await theirs.create(replace(SPEC, claims={"app": "generation-local"}))
    ours = replace(store, mesh="ours", orphaned_after_s=math.inf)
    assert (await ours.unfinished(), await theirs.unfinished()) == ([], ["lake"])
    with pytest.raises(RunExistsError, match=r"'lake' is preparing: stop it first.* dead after 30 s of silence"):
        await ours.create(SPEC)
    with pytest.raises(BusyError):
        await ours.create(replace(SPEC, run_id="other", claims={"app": "generation-local"}))
    with pytest.raises(RunStateError, match=r"stop it first.* dead after 30 s of silence"):
        await ours.delete("lake")
    clock_of(store).now += ORPHANED_AFTER_S + 1
    _, new = await ours.create(replace(SPEC, claims={"app": "generation-local"}))
    assert new
    assert (await ours.unfinished(), await theirs.unfinished()) == (["lake"], [])


async def test_a_silent_run_of_another_mesh_is_deleted(store: RunStore):
    await replace(store, mesh="theirs").create(SPEC)
    clock_of(store).now += ORPHANED_AFTER_S + 1
    await replace(store, orphaned_after_s=math.inf).delete("lake")
    assert await store.run_ids() == []


async def test_a_silent_run_of_another_mesh_is_stopped_at_once(store: RunStore):
    """Its command was killed: nothing else would end it."""
    await replace(store, mesh="theirs").create(SPEC)
    deployed = replace(store, orphaned_after_s=math.inf)
    assert (await deployed.want("lake", DesiredState.STOPPED)).state is RunState.PREPARING
    clock_of(store).now += ORPHANED_AFTER_S + 1
    ended = await deployed.want("lake", DesiredState.STOPPED)
    assert (ended.state, ended.ended_at) == (RunState.STOPPED, clock_of(store).now)
    await deployed.delete("lake")


async def test_the_report_of_another_meshs_run_is_left_to_it(store: RunStore):
    theirs = replace(store, mesh="theirs")
    await theirs.create(SPEC)
    await store.update("lake", report=REPORT_DUE)
    assert (await store.reports_due(), await theirs.reports_due()) == ([], ["lake"])


async def test_a_new_run_deletes_an_ended_one_of_its_name_except_its_epoch(store: RunStore):
    await store.create(SPEC)
    await store.update("lake", state=RunState.FINISHED)
    for run_id in ("lake", "lake2"):
        await store.redis.set(RunKeys(run_id).epoch, 5)
        await store.redis.set(RunKeys(run_id).lease, "somebody")
    record, _ = await store.create(OTHER)
    assert record.attempt == 1
    assert await store.redis.get(RunKeys("lake").lease) is None
    assert await store.redis.get(RunKeys("lake").epoch) == b"6", "who held it is fenced at once"
    assert await store.redis.mget(RunKeys("lake2").lease, RunKeys("lake2").epoch) == [b"somebody", b"5"]


async def test_a_resumed_run_keeps_what_it_left_in_redis(store: RunStore):
    first, _ = await store.create(SPEC)
    await store.update("lake", state=RunState.STOPPED, error="why", wanted=DesiredState.KILLED)
    await store.redis.set(RunKeys("lake").epoch, 5)
    clock_of(store).now += 5
    record, _ = await store.create(replace(OTHER, resume=True))
    assert await store.redis.get(RunKeys("lake").epoch) == b"5"
    assert (record.attempt, record.state, record.wanted, record.error) == (
        2,
        RunState.PREPARING,
        DesiredState.RUNNING,
        "",
    )
    assert record.created_at == first.created_at
    assert await store.load("lake") == record


async def test_a_run_that_is_over_stays_as_it_was_wanted(store: RunStore):
    await store.create(SPEC)
    await store.update("lake", state=RunState.FINISHED)
    await store.want("lake", DesiredState.KILLED)
    assert (await store.load("lake")).wanted is DesiredState.RUNNING


async def test_an_unknown_run_is_named(store: RunStore):
    with pytest.raises(UnknownRunError, match="'nobody'"):
        await store.load("nobody")


async def test_a_deleted_run_leaves_no_key_but_its_epoch_for_a_while(store: RunStore):
    await store.create(SPEC)
    await store.components.set_observations("lake", {"learner": Observation(Health.READY)})
    with pytest.raises(RunStateError, match="stop it first"):
        await store.delete("lake")
    await store.update("lake", state=RunState.FAILED)
    await store.redis.set(RunKeys("lake").epoch, 5)
    await store.delete("lake")
    assert await store.redis.keys("*") == [RunKeys("lake").epoch.encode()]
    assert await store.redis.ttl(RunKeys("lake").epoch) > EPOCH_TTL_S - 600


@pytest.mark.parametrize("resume", [False, True])
async def test_a_deleted_runs_epoch_persists_once_its_name_is_used_again(store: RunStore, resume: bool):
    await store.create(SPEC)
    await store.redis.set(RunKeys("lake").epoch, 5)
    await store.update("lake", state=RunState.FAILED)
    await store.delete("lake")
    await store.create(replace(SPEC, resume=resume))
    assert await store.redis.ttl(RunKeys("lake").epoch) == -1
    assert int(await store.redis.get(RunKeys("lake").epoch) or 0) > 5


async def test_what_a_run_claims_no_other_may_use_until_it_is_over(store: RunStore):
    claims = {"folder": "/x", "app": "generation"}
    await store.create(replace(SPEC, claims=claims))
    other = replace(SPEC, run_id="other", claims={"app": "generation"})
    with pytest.raises(BusyError, match="app 'generation' is in use by run 'lake', which is preparing"):
        await store.create(other)
    await store.create(replace(SPEC, run_id="third", claims={"app": "another"}))
    await store.update("lake", state=RunState.FINISHED)
    await store.create(other)
    with pytest.raises(BusyError, match="'other'"):
        await store.create(replace(OTHER, claims=claims))


async def test_of_two_runs_that_claim_the_same_at_once_one_gets_it(store: RunStore):
    specs = [replace(SPEC, run_id=f"run{i}", claims={"folder": "/x"}) for i in range(8)]
    results = await asyncio.gather(*(store.create(spec) for spec in specs), return_exceptions=True)
    assert sum(isinstance(result, tuple) for result in results) == 1
    assert all(isinstance(result, tuple | BusyError) for result in results)


async def test_a_run_that_ends_or_is_over_neither_pauses_nor_resumes_nor_changes(store: RunStore):
    await store.create(SPEC)
    await store.want("lake", DesiredState.PAUSED)
    assert (await store.want("lake", DesiredState.RUNNING)).wanted is DesiredState.RUNNING
    await store.want("lake", DesiredState.STOPPED)
    for wanted in (DesiredState.PAUSED, DesiredState.RUNNING):
        with pytest.raises(RunStateError, match="'lake' is ending"):
            await store.want("lake", wanted)
    with pytest.raises(RunStateError, match="'lake' is ending"):
        await store.change("lake", {"temperature": 0.5})
    await store.want("lake", DesiredState.KILLED)
    assert (await store.want("lake", DesiredState.STOPPED)).wanted is DesiredState.KILLED
    await store.update("lake", state=RunState.STOPPED)
    with pytest.raises(RunStateError, match="'lake' is stopped: it can't pause"):
        await store.want("lake", DesiredState.PAUSED)


async def test_a_resumed_run_keeps_changed_settings_unless_reconfigured(
    store: RunStore,
):
    await store.create(SPEC)
    await store.change("lake", {"num_workers": 4})
    await store.change("lake", {"num_replicas": 3})
    await store.update("lake", state=RunState.STOPPED)
    settings = replace(SETTINGS, num_replicas=2)
    record, _ = await store.create(replace(OTHER, settings=settings, resume=True))
    assert await store.settings(record) == replace(SETTINGS, num_workers=4, num_replicas=2)
    record, _ = await store.create(replace(OTHER, settings=settings), takeover=True)
    assert await store.settings(record) == settings


async def test_history_shows_commands_and_their_results(store: RunStore):
    await store.create(SPEC)
    await store.want("lake", DesiredState.PAUSED)
    await store.want("lake", DesiredState.PAUSED)
    await store.update("lake", state=RunState.PAUSED)
    await store.change("lake", {"temperature": 0.5})
    entries = await store.redis.xrange(RunKeys("lake").history)
    assert [fields[b"e"] for _, fields in entries] == [b"created", b"wanted", b"state", b"asked"]


async def test_a_recovery_is_noted_once_for_what_had_died(store: RunStore):
    await store.create(SPEC)
    for health in (Health.STARTING, Health.READY, Health.DEAD):
        await store.components.set_observations("lake", {name: Observation(health) for name in ("learner", "workers")})
    await store.components.set_restarts(
        "lake", "learner", Restarts(1, 1, 7.0, "x", step=4, has_recovered=False), "exit code 1"
    )
    for health in (Health.STARTING, Health.READY, Health.STARTING, Health.READY):  # the second is no death
        await store.components.set_observations("lake", {name: Observation(health) for name in ("learner", "workers")})
    entries = await store.redis.xrange(RunKeys("lake").history)
    noted = [(fields[b"e"].decode(), json.loads(fields[b"d"])) for _, fields in entries][1:]
    assert noted == [
        ("died", {"component": "learner", "why": "exit code 1", "restarts": 1, "step": 4}),
        ("recovered", {"component": "learner", "step": 0}),
    ]
    assert (await store.components.restarts("lake"))["learner"].total == 1


async def test_observations_come_back(store: RunStore):
    await store.create(SPEC)
    seen = {"learner": Observation(Health.DEAD, "exit code 1", "logs/learner.out", "x")}
    await store.components.set_observations("lake", seen)
    assert await store.components.observations("lake") == seen


async def test_a_run_started_again_while_it_is_deleted_stays(store: RunStore, monkeypatch: pytest.MonkeyPatch):
    """The delete has read that the run is over; the start comes before it removes anything."""
    await store.create(SPEC)
    await store.update("lake", state=RunState.FINISHED)
    keys_of = RunStore._keys_of
    starts: list[RunSpec] = [replace(SPEC, resume=True)]

    async def start_meanwhile(self: RunStore, run_id: str) -> list[bytes]:
        keys = await keys_of(self, run_id)
        if starts:
            await store.create(starts.pop())
        return keys

    monkeypatch.setattr(RunStore, "_keys_of", start_meanwhile)
    with pytest.raises(RunStateError, match="is preparing: stop it first"):
        await store.delete("lake")
    assert (await store.load("lake")).attempt == 2


@pytest.mark.parametrize("ending", ["deleted", "over"])
async def test_a_change_of_a_run_that_ends_meanwhile_leaves_nothing(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, ending: str
):
    await store.create(SPEC)
    load, endings = RunStore.load, [ending]

    async def end_meanwhile(self: RunStore, run_id: str) -> RunRecord:
        record = await load(self, run_id)
        if endings:
            await store.update(run_id, state=RunState.FINISHED)
            if endings.pop() == "deleted":
                await store.delete(run_id)
        return record

    monkeypatch.setattr(RunStore, "load", end_meanwhile)
    with pytest.raises(UnknownRunError if ending == "deleted" else RunStateError):
        await store.change("lake", {"temperature": 0.5})
    keys = RunKeys("lake")
    assert {key async for key in store.redis.scan_iter(match=keys.prefix + "*")} <= (
        {keys.epoch.encode()}
        if ending == "deleted"
        else {keys.epoch.encode(), keys.record.encode(), keys.history.encode()}
    )


async def test_a_run_that_moved_to_another_folder_no_longer_holds_its_first(store: RunStore):
    first = replace(SPEC, claims={"folder": "/tmp/shared", "app": "engine"})
    await store.create(first)
    await store.update("lake", state=RunState.FINISHED)
    await store.create(replace(first, claims={"folder": "/tmp/own", "app": "engine"}))
    await store.create(replace(first, run_id="sea", claims={"folder": "/tmp/shared", "app": "other"}))
    for claims, kind in (({"folder": "/tmp/own"}, "folder '/tmp/own'"), ({"app": "engine"}, "app 'engine'")):
        with pytest.raises(BusyError, match=f"{kind} is in use by run 'lake'"):
            await store.create(replace(first, run_id="third", claims=claims))


async def test_a_connection_lost_within_a_transaction_repeats_it(
    store: RunStore, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    watch, kills = Pipeline.watch, list[int]()

    async def watch_and_lose_the_connection(self: Pipeline, *names: str) -> object:
        watched = await watch(self, *names)
        if len(kills) == 0:
            own_id = str(await self.immediate_execute_command("CLIENT", "ID"))  # pyright: ignore[reportGeneralTypeIssues]
            with connect(redis_url) as other:
                kills.append(int(other.client_kill_filter(_id=own_id)))  # pyright: ignore[reportArgumentType]
        return watched

    monkeypatch.setattr(Pipeline, "watch", watch_and_lose_the_connection)
    for act in (
        lambda: store.create(SPEC),
        lambda: store.want("lake", DesiredState.PAUSED),
        lambda: store.change("lake", {"max_staleness": 2.0}),
    ):
        kills.clear()
        await act()
        assert kills == [1]
    assert (await store.load("lake")).wanted is DesiredState.PAUSED
