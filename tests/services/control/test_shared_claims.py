"""Claims of runs that share a generation application, in a real Redis."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from offbeat.services.control.lost_records import LostRecords
from offbeat.services.control.rights import Rights
from offbeat.services.control.run import BusyError, RunSpec, RunState
from offbeat.services.control.service import ControlService
from offbeat.services.control.store import RunStore
from offbeat.services.keys import RunKeys, claims_key, slots_key, split_claim
from tests.copying import replace
from tests.services.control.api_harness import FakeRunFactory
from tests.services.control.control_fakes import SETTINGS, FakeClock

SPEC = RunSpec("lake", '{"max_steps": 3}', "/tmp/lake", 3, SETTINGS)


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[RunStore]:
    async with Redis.from_url(redis_url) as client:
        yield RunStore(client, FakeClock())


async def give_slots(store: RunStore, number: int) -> None:
    await cast(Any, store.redis.hset(slots_key("app"), "engines", str(number)))


def sharing(run_id: str, base: str = "b", **claims: str) -> RunSpec:
    return replace(SPEC, run_id=run_id, base=base, claims=claims or {"app": "engines"})


async def claim_of(store: RunStore, app: str = "engines") -> list[str]:
    return split_claim(await cast(Any, store.redis.hget(claims_key("app"), app)))


async def test_runs_share_a_resource_up_to_its_slots(store: RunStore):
    await give_slots(store, 2)
    for run_id in ("one", "two"):
        await store.create(sharing(run_id))
    with pytest.raises(
        BusyError, match="has 2 adapter slots, all in use by run 'one', which is preparing and run 'two'"
    ):
        await store.create(sharing("three"))
    assert await store.create(sharing("one")) == (await store.load("one"), False)
    await store.update("one", state=RunState.FINISHED)
    await store.create(sharing("three"))
    assert await claim_of(store) == ["two", "three"]


async def test_of_runs_that_claim_slots_at_once_as_many_get_one_as_there_are(store: RunStore):
    await give_slots(store, 3)
    specs = [sharing(f"run{i}") for i in range(8)]
    results = await asyncio.gather(*(store.create(spec) for spec in specs), return_exceptions=True)
    started = {result[0].run_id for result in results if isinstance(result, tuple)}
    assert set(await claim_of(store)) == started
    assert len(started) == 3
    assert sum(isinstance(result, BusyError) for result in results) == 5


@pytest.mark.parametrize(
    ("slots", "held", "base", "reason"),
    [
        (1, "b", "b", "in use by run 'one', which is preparing: stop it first, or use another app"),
        (2, "b", "other", "whose adapters are on another base: start from the same weights"),
        (2, "", "b", "whose adapters are on another base"),
        (2, "b", "", "this run's warm start trains its own: leave warm_start out"),
        (2, "", "", "this run's warm start trains its own"),
    ],
)
async def test_runs_with_other_bases_or_none_share_nothing(
    store: RunStore, slots: int, held: str, base: str, reason: str
):
    await give_slots(store, slots)
    await store.create(sharing("one", held))
    with pytest.raises(BusyError, match=reason):
        await store.create(sharing("two", base))
    await store.update("one", state=RunState.STOPPED)
    await store.create(sharing("two", base))
    assert await claim_of(store) == ["two"]


async def test_a_run_that_was_recorded_before_slots_is_not_joined(store: RunStore):
    await store.create(sharing("one"))
    await cast(Any, store.redis.hdel(RunKeys("one").record, "base"))
    await give_slots(store, 2)
    with pytest.raises(BusyError, match="run 'one'"):
        await store.create(sharing("two"))
    assert await claim_of(store) == ["one"]


async def test_a_run_that_moves_to_another_application_leaves_its_slot(store: RunStore):
    await give_slots(store, 2)
    for run_id in ("one", "two"):
        await store.create(sharing(run_id))
    await store.update("one", state=RunState.FINISHED)
    await store.create(sharing("one", app="others"))
    assert (await claim_of(store), await claim_of(store, "others")) == (["two"], ["one"])


async def test_a_shared_claim_that_redis_has_lost_is_restored(store: RunStore):
    """The first run's record brings it back; the others claim their slots again, as their components notice."""
    await give_slots(store, 2)
    lost = LostRecords(store)
    for run_id in ("one", "two"):
        await store.create(sharing(run_id))
        await lost.note(await store.load(run_id))
    for run_id in ("one", "two"):
        await cast(Any, store.redis.delete(RunKeys(run_id).record, claims_key("app")))
    assert await lost.put_back([]) == ["one", "two"]
    assert await claim_of(store) == ["one"]
    assert (await store.load("two")).base == "b"


async def test_a_deleted_run_leaves_no_claim_and_others_keep_theirs(store: RunStore):
    await give_slots(store, 2)
    for run_id in ("one", "two"):
        await store.create(sharing(run_id, app="engines", folder=f"/runs/{run_id}"))
        await store.update(run_id, state=RunState.FINISHED)
    await store.delete("one")
    assert await claim_of(store) == ["two"]
    assert await store.redis.hkeys(claims_key("folder")) == [b"/runs/two"]  # pyright: ignore[reportGeneralTypeIssues]
    await store.delete("two")
    assert await store.redis.exists(claims_key("app"), claims_key("folder")) == 0


class ChoosingFactory(FakeRunFactory):
    """Gives a run the first application that no run has claimed, or its own; the first two starts choose at once."""

    def __init__(self, redis: Redis) -> None:
        super().__init__(redis)
        self._redis = redis
        self.chosen: list[str] = []
        self._both = asyncio.Barrier(2)

    async def validate(self, document: str | dict[str, Any], rights: Rights) -> RunSpec:
        spec = await super().validate(document, rights)
        claimed = await cast(Any, self._redis.hkeys(claims_key("app")))
        free = [app for app in ("a", "b") if app.encode() not in claimed]
        app = json.loads(spec.config).get("app") or (free[0] if free else spec.run_id)
        self.chosen.append(app)
        if len(self.chosen) <= 2:
            await self._both.wait()
        return replace(spec, claims={**spec.claims, "app": app})


async def test_a_start_chooses_again_if_another_takes_its_application(store: RunStore):
    factory = ChoosingFactory(store.redis)
    service = ControlService(store, factory, wake=lambda: None)
    await asyncio.gather(*(service.create({"exp_name": name}) for name in ("one", "two")))
    assert factory.chosen == ["a", "a", "b"]
    assert len(await claim_of(store, "a")) == len(await claim_of(store, "b")) == 1
    with pytest.raises(BusyError, match="app 'a' is in use by run"):
        await service.create({"exp_name": "three", "app": "a"})
    with pytest.raises(BusyError, match="folder '/runs/one' is in use by run 'one'"):
        await service.create({"exp_name": "four", "output_dir": "/runs/one"})
