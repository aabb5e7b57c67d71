"""Turns whose replica goes to sleep: they continue at another one, or wait until one wakes."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from offbeat.services.awake_clock import AwakeClock
from offbeat.services.errors import RetryableError
from offbeat.services.generation import resumption
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.resumption import ResumedCalls
from offbeat.services.messages.types import Completion, FinishReason, GenerateRequest, Sampling, VersionSpan
from tests.services.generation.test_replica import Stage, settle
from tests.waiting import wait_until

Batches = list[list[Completion]]


class Call:
    def __init__(self, batches: AsyncIterator[list[Completion]]) -> None:
        self._batches = batches
        self.is_cancelled = False

    def __aiter__(self) -> AsyncIterator[list[Completion]]:
        return self._batches

    def cancel(self) -> None:
        self.is_cancelled = True


class Mesh:
    """Two replicas behind a router that takes the first one that is not known to sleep, and what was sent to each."""

    def __init__(self) -> None:
        config = GenerationConfig(request_timeout_s=60.0)
        self.replicas = {name: Stage(config, name) for name in ("a", "b")}
        self.a, self.b = self.replicas.values()
        self.sent: list[tuple[str, Sequence[GenerateRequest]]] = []
        self.calls: list[Call] = []
        self.clock = AwakeClock()
        self.client = ResumedCalls(self.call, self.clock)

    def call(self, requests: Sequence[GenerateRequest], asleep: Sequence[str], replica_id: str) -> Call:
        name = replica_id or next((name for name in self.replicas if name not in asleep), "a")
        self.sent.append((name, requests))
        self.calls.append(Call(self.replicas[name].replica.generate(requests)))
        return self.calls[-1]

    def generate(self, *request_ids: str, replica_id: str = "") -> "asyncio.Task[Batches]":
        requests = [GenerateRequest(request_id, (1, 2), Sampling(max_new_tokens=8)) for request_id in request_ids]

        async def collect() -> Batches:
            return [completions async for completions in self.client.generate(requests, replica_id) if completions]

        return asyncio.create_task(collect())

    def names(self) -> list[str]:
        return [name for name, _ in self.sent]


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    mesh = Mesh()
    for stage in mesh.replicas.values():
        await stage.publish(3)
    yield mesh
    for stage in mesh.replicas.values():
        await stage.close()


async def test_a_turn_leaves_the_replica_of_its_route_when_that_sleeps(mesh: Mesh) -> None:
    answers = mesh.generate("first", replica_id="b")
    await mesh.b.asked("first")
    await mesh.b.replica.sleep()
    await mesh.a.asked("first")
    mesh.a.engine.finish("first")
    await answers
    assert mesh.names() == ["b", "a"]
    later = mesh.generate("second", replica_id="b")
    await mesh.a.asked("second")
    mesh.a.engine.finish("second")
    await later
    await mesh.b.replica.wake()


async def test_a_turn_continues_at_another_replica_with_its_tokens(mesh: Mesh) -> None:
    """Its siblings of the same call were answered before, or had no token."""
    answers = mesh.generate("whole", "begun", "new")
    await mesh.a.asked("whole", "begun", "new")
    mesh.a.engine.finish("whole")
    mesh.a.engine.sampled["begun"] = (5, 6)
    await settle()
    await mesh.a.replica.sleep()
    await mesh.b.asked("begun", "new")
    await mesh.b.publish(4)
    (_, (begun, new)) = mesh.sent[1]
    assert (list(begun.prompt), begun.sampling.max_new_tokens, begun.num_answered) == ([1, 2, 5, 6], 6, 2)
    assert (list(new.prompt), new.sampling.max_new_tokens, new.num_answered) == ([1, 2], 8, 0)
    mesh.b.engine.finish("begun", "new", version=3)
    completions = {each.request_id: each for batch in await answers for each in batch}
    assert completions["begun"] == Completion(
        "begun",
        (5, 6, 7),
        (-0.5,) * 3,
        (VersionSpan(0, 2, 3), VersionSpan(2, 3, 3)),
        FinishReason.STOP,
        cached_tokens=2,
    )
    assert completions["new"].token_ids == completions["whole"].token_ids == (7,)
    assert sum(map(len, await answers)) == 3
    assert mesh.names() == ["a", "b"]


async def test_a_sleeping_replica_gets_no_request_until_it_wakes(mesh: Mesh) -> None:
    await mesh.a.replica.sleep()
    for request_id, expected in (("1", ["a", "b"]), ("2", ["b"]), ("3", ["b"])):
        mesh.sent.clear()
        answer = mesh.generate(request_id)
        await mesh.b.asked(request_id)
        assert mesh.names() == expected
        mesh.b.engine.finish(request_id)
        await answer
    await mesh.a.replica.wake()
    await settle()
    mesh.sent.clear()
    answer = mesh.generate("4")
    await mesh.a.asked("4")
    mesh.a.engine.finish("4")
    await answer
    assert mesh.names() == ["a"]
    assert not any(call.is_cancelled for call in mesh.calls)


async def test_turns_wait_for_the_first_replica_that_wakes(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile the clock stands still, and the caller hears that they wait."""
    monkeypatch.setattr(resumption, "RETRY_INTERVAL_S", 600.0)
    await mesh.a.replica.sleep()
    await mesh.b.replica.sleep()
    answer = mesh.generate("turn")
    await wait_until(lambda: mesh.names() == ["a", "b", "a"])
    await settle()
    stopped = mesh.clock.time()
    await asyncio.sleep(0.01)
    assert mesh.clock.time() == stopped
    await mesh.b.replica.wake()
    await mesh.b.asked("turn")
    assert mesh.names() == ["a", "b", "a", "b"]
    assert mesh.clock.time() >= stopped
    mesh.b.engine.finish("turn")
    assert [[each.token_ids for each in batch] for batch in await answer] == [[(7,)]]
    await mesh.a.replica.wake()


async def test_turns_find_a_replica_that_starts_while_all_sleep(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumption, "RETRY_INTERVAL_S", 0.05)
    started = mesh.replicas.pop("b")
    await mesh.a.replica.sleep()
    answer = mesh.generate("turn")
    await wait_until(lambda: len(mesh.sent) > 2)
    mesh.replicas["b"] = started
    await mesh.b.asked("turn")
    mesh.b.engine.finish("turn")
    assert len(await answer) == 1
    await mesh.a.replica.wake()


async def test_a_turn_that_is_withdrawn_while_it_waits_is_not_sent_again(mesh: Mesh) -> None:
    await mesh.a.replica.sleep()
    await mesh.b.replica.sleep()
    answer = mesh.generate("withdrawn", "kept")
    await wait_until(lambda: mesh.names() == ["a", "b", "a"])
    await settle()
    mesh.client.withdraw(["withdrawn"])
    await mesh.a.replica.wake()
    await mesh.a.asked("kept")
    mesh.a.engine.finish("kept")
    completions = {each.request_id: each.error for batch in await answer for each in batch}
    assert completions == {"withdrawn": "aborted", "kept": ""}
    assert [each.request_id for each in mesh.sent[-1][1]] == ["kept"]
    await mesh.b.replica.wake()


async def test_a_replica_that_dies_asleep_is_forgotten(mesh: Mesh) -> None:
    await mesh.a.replica.sleep()
    answer = mesh.generate("turn")
    await mesh.b.asked("turn")
    mesh.b.engine.finish("turn")
    await answer
    await mesh.a.replica.retire("its process was killed")
    await settle()
    mesh.sent.clear()
    with pytest.raises(RetryableError, match="its process was killed"):
        await mesh.generate("next")
    assert mesh.names() == ["a"]


async def test_a_caller_who_leaves_ends_its_call(mesh: Mesh) -> None:
    answer = mesh.generate("turn")
    await mesh.a.asked("turn")
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    assert [call.is_cancelled for call in mesh.calls] == [True]


def test_a_resumed_turn_has_the_experts_of_the_replica_that_computed_a_token_first() -> None:
    begun = Completion("r", (5, 6), (-0.5,) * 2, (VersionSpan(0, 2, 3),), routing=np.full((3, 1, 1), 1, dtype=np.uint8))
    request = GenerateRequest("r", (1, 2, 3, 4), Sampling(max_new_tokens=9), routing_start=2)
    assert resumption.request_rest(request, begun).routing_start == 5  # the second sampled token was not computed
    rest = Completion("r", (7,), (-0.5,), (VersionSpan(0, 1, 4),), routing=np.full((1, 1, 1), 2, dtype=np.uint8))
    joined = resumption.join(begun, rest)
    assert joined.routing is not None
    assert joined.routing[:, 0, 0].tolist() == [1, 1, 1, 2]
