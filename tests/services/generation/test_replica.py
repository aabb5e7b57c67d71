"""A replica with a fake engine: which weights a request meets, what an update and its failure do to it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from offbeat.services.errors import GenerationError, RetryableError, RewoundError, WeightsRefusedError
from offbeat.services.generation import replica as service
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.engine import KvLoad, SessionCounts
from offbeat.services.generation.replica import GenerationReplica
from offbeat.services.messages.types import Completion, GenerateRequest, Sampling
from tests.services.generation.generation_fakes import FakeBroker, FakeEngine
from tests.waiting import wait_until


class Stage:
    """A replica that follows a broker, and what came of the calls to it."""

    def __init__(self, config: GenerationConfig | None = None, replica_id: str = "r") -> None:
        self.engine = FakeEngine()
        self.broker = FakeBroker()
        self.replica = GenerationReplica(replica_id, self.engine, self.broker, config or GenerationConfig())
        self.following = asyncio.create_task(self.replica.follow())
        self.calls: list[asyncio.Task[list[list[Completion]]]] = []

    async def publish(self, version: int) -> None:
        await self.broker.publish(version)
        await wait_until(lambda: self.replica.status()["version"] == version)

    def call(self, *request_ids: str, min_version: int = 0) -> "asyncio.Task[list[list[Completion]]]":
        requests = [GenerateRequest(request_id, (1, 2), Sampling(), min_version) for request_id in request_ids]

        async def collect() -> list[list[Completion]]:
            return [completions async for completions in self.replica.generate(requests)]

        self.calls.append(asyncio.create_task(collect()))
        return self.calls[-1]

    async def asked(self, *request_ids: str) -> None:
        await wait_until(lambda: set(request_ids) <= self.engine.asked.keys())

    async def close(self) -> None:
        for task in (self.following, *self.calls):
            task.cancel()
        await asyncio.gather(self.following, *self.calls, return_exceptions=True)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    yield stage
    await stage.close()


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_requests_wait_for_the_first_version(stage: Stage) -> None:
    call = stage.call("a")
    await settle()
    assert stage.engine.asked == {}
    assert stage.replica.status()["waiting"] == 1
    await stage.publish(0)
    await stage.asked("a")
    stage.engine.finish("a")
    assert [[c.request_id for c in batch] for batch in await call] == [["a"]]


async def test_a_request_waits_until_its_version_is_served(stage: Stage) -> None:
    await stage.publish(0)
    call = stage.call("new", min_version=2)
    old = stage.call("old")
    await stage.asked("old")
    await stage.publish(1)
    await settle()
    assert "new" not in stage.engine.asked
    await stage.publish(2)
    await stage.asked("new")
    stage.engine.finish("new")
    assert (await call)[0][0].versions[0].version == 2
    stage.engine.finish("old", version=0)
    assert (await old)[0][0].versions[0].version == 0


async def test_only_the_newest_of_several_versions_is_loaded(stage: Stage) -> None:
    stage.engine.may_load.clear()
    for version in range(4):
        await stage.broker.publish(version)
        await settle()
    stage.engine.may_load.set()
    await wait_until(lambda: stage.engine.loads == [0, 3])


async def test_no_request_starts_during_a_load_and_running_ones_continue(stage: Stage) -> None:
    await stage.publish(0)
    before = stage.call("before")
    await stage.asked("before")
    stage.engine.may_load.clear()
    await stage.broker.publish(1)
    await settle()
    during = stage.call("during")
    await settle()
    assert set(stage.engine.asked) == {"before"}
    stage.engine.may_load.set()
    await stage.asked("during")
    stage.engine.finish("before", version=0)
    stage.engine.finish("during")
    assert (await before)[0][0].versions[0].version == 0
    assert (await during)[0][0].versions[0].version == 1


async def test_a_request_whose_first_token_came_after_an_update_is_sampled_again(stage: Stage) -> None:
    await stage.publish(0)
    call = stage.call("a")
    await stage.asked("a")
    await stage.publish(1)
    stage.engine.finish("a", version=1)
    await stage.asked("a")
    stage.engine.finish("a", version=1)
    assert (await call)[0][0].versions[0].version == 1
    assert stage.engine.handed_in == [("a", 0), ("a", 1)]
    assert stage.replica.take_metrics().values["resampled"].value == 1


async def test_with_recomputed_caches_nothing_is_sampled_again() -> None:
    stage = Stage(GenerationConfig(on_weight_update="recompute"))
    await stage.publish(0)
    call = stage.call("a")
    await stage.asked("a")
    await stage.publish(1)
    stage.engine.finish("a", version=1)
    assert (await call)[0][0].versions[0].version == 1
    await stage.close()


async def test_turns_do_not_wait_for_the_slowest_and_return_in_batches(stage: Stage) -> None:
    await stage.publish(0)
    call = stage.call("a", "b", "c")
    await stage.asked("a", "b", "c")
    stage.engine.finish("a", "c")
    await settle()
    assert not call.done()
    stage.engine.finish("b")
    assert [[c.request_id for c in batch] for batch in await call] == [["a", "c"], ["b"]]


async def test_a_failed_update_fails_requests_and_the_health_check(stage: Stage) -> None:
    await stage.publish(0)
    call = stage.call("running")
    await stage.asked("running")
    stage.engine.load_error = ValueError("half loaded")
    await stage.broker.publish(1)
    with pytest.raises(GenerationError, match="version 1 could not be loaded: half loaded"):
        await stage.following
    for refused in (call, stage.call("late"), stage.call("later", min_version=1)):
        with pytest.raises(RetryableError, match="half loaded"):
            await refused
    with pytest.raises(RetryableError, match="half loaded"):
        await stage.replica.check_health()
    assert stage.engine.given_up == ["running"]
    assert stage.replica.status()["version"] == 0


async def test_an_update_that_takes_too_long_has_failed() -> None:
    stage = Stage(GenerationConfig(update_timeout_s=0.05))
    stage.engine.may_load.clear()
    call = stage.call("a")
    await stage.broker.publish(0)
    with pytest.raises(GenerationError, match="TimeoutError"):
        await stage.following
    with pytest.raises(RetryableError, match="version 0 could not be loaded"):
        await call
    await stage.close()


async def test_damaged_weights_are_refused_and_old_ones_stay_in_use(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RETRY_INTERVAL_S", 0.001)
    await stage.publish(0)
    stage.broker.damaged.add(1)
    await stage.broker.publish(1)
    await wait_until(lambda: stage.broker.refusals >= 3)
    call = stage.call("a")
    await stage.asked("a")
    stage.engine.finish("a")
    assert (await call)[0][0].versions[0].version == 0
    await stage.replica.check_health()
    await stage.publish(2)
    assert stage.engine.loads == [0, 2]
    assert stage.replica.take_metrics().values["refused_weights"].value >= 3


async def test_a_broker_that_cannot_be_reached_is_asked_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "RETRY_INTERVAL_S", 0.001)
    await stage.publish(0)
    stage.broker.unreachable = True
    await stage.broker.publish(1)
    await wait_until(lambda: stage.replica.status()["version"] == 1)
    await wait_until(lambda: stage.broker.refusals >= 3)
    stage.broker.unreachable = False
    await stage.publish(2)


async def test_requests_wait_for_the_swap_of_weights_not_for_the_staging(stage: Stage) -> None:
    await stage.publish(0)
    stage.engine.may_stage.clear()
    stage.engine.may_load.clear()
    await stage.broker.publish(1)
    await wait_until(lambda: len(stage.engine.staged) == 2)
    early = stage.call("early")
    await stage.asked("early")
    stage.engine.may_stage.set()
    await wait_until(lambda: stage.replica._updating)
    late = stage.call("late")
    await wait_until(lambda: stage.replica.status()["waiting"] == 1)
    stage.engine.finish("early", version=0)
    assert (await early)[0][0].versions[0].version == 0
    stage.engine.may_load.set()
    await stage.asked("late")
    stage.engine.finish("late")
    assert (await late)[0][0].versions[0].version == 1
    assert stage.engine.handed_in == [("early", 0), ("late", 1)]


async def test_a_replica_that_is_stopped_while_it_stages_is_not_broken(stage: Stage) -> None:
    await stage.publish(0)
    stage.engine.may_stage.clear()
    await stage.broker.publish(1)
    await wait_until(lambda: len(stage.engine.staged) == 2)
    stage.following.cancel()
    await asyncio.gather(stage.following, return_exceptions=True)
    assert stage.following.cancelled()
    assert stage.replica.status()["broken"] == ""


async def test_a_late_replica_catches_up_before_it_follows() -> None:
    engine, broker = FakeEngine(), FakeBroker()
    for version in range(3):
        await broker.publish(version)
    replica = GenerationReplica("late", engine, broker, GenerationConfig())
    await replica.catch_up()
    assert engine.loads == [2]
    assert broker.reports == [("late", -1), ("late", 2)]
    assert [load.loading for load in broker.loads] == [2, None], "it says what it loads while it loads"


async def test_catching_up_without_readable_weights_leaves_a_replica_that_waits() -> None:
    engine, broker = FakeEngine(), FakeBroker()
    replica = GenerationReplica("late", engine, broker, GenerationConfig())
    await replica.catch_up()
    broker.damaged.add(0)
    await broker.publish(0)
    await replica.catch_up()
    assert replica.status() == {"replica_id": "late", "version": -1, "running": 0, "waiting": 0, "broken": ""}


async def test_a_replica_whose_first_load_fails_does_not_become_ready() -> None:
    engine, broker = FakeEngine(), FakeBroker()
    engine.load_error = ValueError("half loaded")
    await broker.publish(0)
    with pytest.raises(GenerationError, match="half loaded"):
        await GenerationReplica("late", engine, broker, GenerationConfig()).catch_up()


async def test_a_request_without_an_answer_in_time_ends_alone() -> None:
    stage = Stage(GenerationConfig(request_timeout_s=2.0))
    await stage.publish(0)
    call = stage.call("slow", "never", min_version=0)
    await stage.asked("slow", "never")
    stage.engine.finish("slow")
    (first,), (second,) = await call
    assert (first.request_id, first.error) == ("slow", "")
    assert (second.request_id, second.error) == ("never", "no answer within 2.0 s")
    assert stage.engine.given_up == ["never"]
    await stage.close()


async def test_an_aborted_request_ends_alone(stage: Stage) -> None:
    await stage.publish(0)
    call = stage.call("a", "b")
    await stage.asked("a", "b")
    await stage.replica.abort(["a", "unknown"])
    await wait_until(lambda: stage.engine.given_up == ["a"])
    stage.engine.finish("b")
    completions = {c.request_id: c for batch in await call for c in batch}
    assert completions["a"].error == "aborted"
    assert completions["b"].error == ""


async def test_a_caller_who_leaves_takes_the_requests_along(stage: Stage) -> None:
    await stage.publish(0)
    call = stage.call("a", "b")
    await stage.asked("a", "b")
    call.cancel()
    await wait_until(lambda: sorted(stage.engine.given_up) == ["a", "b"])
    assert stage.replica.status()["running"] == 0


async def test_a_dead_engine_makes_calls_retryable_and_the_replica_unhealthy(stage: Stage) -> None:
    await stage.publish(0)
    stage.engine.dead = True
    with pytest.raises(RetryableError, match="the engine died"):
        await stage.call("a")
    with pytest.raises(RetryableError, match="the engine died"):
        await stage.replica.check_health()


async def test_metrics_count_everything_once(stage: Stage) -> None:
    await stage.publish(0)
    call = stage.call("a", "b")
    await stage.asked("a", "b")
    stage.engine.finish("a", "b")
    await call
    record = stage.replica.take_metrics()
    assert (record.source, record.labels) == ("generation", {"replica": "r"})
    values = {name: partial.value for name, partial in record.values.items()}
    assert (values["tokens"], values["requests"], values["errors"]) == (2, 2, 0)
    assert (values["weight_updates"], values["pause_s"], values["load_s"]) == (1, 0.02, 0.01)
    assert (values["version"], values["running"], values["waiting"]) == (0, 0, 0)
    assert values["prefix_cache_hit_rate"] == 0.5
    stage.engine.sessions = SessionCounts(waiting=3, continued=7)
    values = stage.replica.take_metrics().values
    assert (values["sessions"].value, values["continued"].value) == (3, 7)
    again = stage.replica.take_metrics().values
    assert again["tokens"].value == again["weight_updates"].value == again["continued"].value == 0
    assert again.keys().isdisjoint({"pause_s", "prefix_cache_hit_rate", "kv_usage", "preemptions"})


async def test_the_load_of_the_kv_cache_is_recorded_and_reported(stage: Stage) -> None:
    stage.engine.kv = KvLoad(usage=0.75, preemptions=5, recent_preemptions=2, tokens=4096)
    values = stage.replica.take_metrics().values
    assert (values["kv_usage"].value, values["preemptions"].value) == (0.75, 5)
    assert stage.replica.take_metrics().values["preemptions"].value == 0
    await stage.replica.report()
    load = stage.broker.loads[-1]
    assert (load.kv_usage, load.preemptions, load.recent_preemptions, load.kv_tokens) == (0.75, 5, 2, 4096)


async def test_a_replica_that_retires_ends_what_runs_and_what_waits(stage: Stage) -> None:
    await stage.publish(0)
    running, waiting = stage.call("a"), stage.call("b", min_version=9)
    await wait_until(lambda: stage.engine.handed_in == [("a", 0)])
    await stage.replica.retire("the run has left")
    for call in (running, waiting):
        with pytest.raises(RetryableError, match="the run has left"):
            await call
    assert stage.engine.given_up == ["a"]


async def test_a_replica_settles_when_no_update_is_under_way(stage: Stage) -> None:
    await stage.publish(0)
    stage.engine.may_load.clear()
    await stage.broker.publish(1)
    await wait_until(lambda: stage.broker.loads[-1].loading == 1)
    settled = asyncio.create_task(stage.replica.settle())
    await asyncio.sleep(0)
    assert not settled.done()
    stage.engine.may_load.set()
    await settled
    assert stage.engine.loads == [0, 1]


async def test_refused_weights_leave_the_earlier_version_in_service(stage: Stage):
    await stage.publish(0)
    stage.engine.load_error = WeightsRefusedError("its base differs")
    await stage.broker.publish(1)
    await wait_until(lambda: stage.broker.loads[-1].refused == "its base differs")
    status = stage.replica.status()
    assert (status["version"], status["broken"]) == (0, "")
    call = stage.call("a")
    await stage.asked("a")
    stage.engine.finish("a")
    assert [[c.versions[0].version for c in batch] for batch in await call] == [[0]]
    stage.engine.load_error = None
    await wait_until(lambda: stage.replica.status()["version"] == 1)
    await wait_until(lambda: stage.broker.loads[-1].refused == "")


async def test_a_load_that_did_not_begin_is_not_reported(stage: Stage) -> None:
    """Its own report had no answer, so that it waits for the next attempt."""
    await stage.publish(0)
    stage.broker.lost_reports = 1
    await stage.broker.publish(1)
    await wait_until(lambda: stage.broker.lost_reports == 0)
    await stage.replica.report()
    assert stage.broker.loads[-1].loading is None


async def test_a_replica_of_discarded_weights_is_replaced(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait_newer(version: int, _: float) -> None:
        raise RewoundError(f"version {version} did not survive")

    await stage.publish(3)
    monkeypatch.setattr(stage.broker, "wait_newer", wait_newer)
    await stage.publish(4)
    with pytest.raises(GenerationError, match="version 4 did not survive"):
        await stage.following
    with pytest.raises(RetryableError):
        await stage.replica.check_health()
