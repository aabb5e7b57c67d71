import asyncio
from dataclasses import replace

import pytest

from offbeat.services.errors import GenerationError, RetryableError
from offbeat.services.generation.routing import ReplicaRoute
from offbeat.services.messages.types import Completion, GenerateRequest, Sampling
from offbeat.services.rollout.episodes.turn_batcher import TurnBatcher
from tests.fakes_rollout import FakeGeneration
from tests.waiting import wait_until

STOP = 3


def request(name: str, *prompt: int) -> GenerateRequest:
    return GenerateRequest(name, prompt or (1,), Sampling(max_new_tokens=4, stop_token_ids=(STOP,)))


def echo(r: GenerateRequest) -> tuple[int, ...]:
    return (r.prompt[-1], STOP)


async def test_turns_that_are_ready_together_travel_in_one_call():
    client = FakeGeneration(echo)
    batcher = TurnBatcher(client, coalesce_s=0.0)
    answers = await asyncio.gather(*(batcher.sample(request(f"r{i}", i)) for i in range(20)))
    assert [answer.token_ids[0] for answer in answers] == list(range(20))
    assert [len(call) for call in client.calls] == [20]


async def test_turns_that_follow_on_answers_of_one_call_travel_together_again():
    client = FakeGeneration(echo)
    batcher = TurnBatcher(client, coalesce_s=0.0)

    async def three_turns(i: int) -> None:
        for turn in range(3):
            await batcher.sample(request(f"{i}/{turn}"))

    await asyncio.gather(*(three_turns(i) for i in range(8)))
    assert [len(call) for call in client.calls] == [8, 8, 8]


class Routed(FakeGeneration):
    """Two replicas, `a` for even prompts."""

    def __init__(self) -> None:
        super().__init__(echo)
        self.replicas: list[str] = []
        self.forgotten: list[str] = []
        self.avoided: list[str] = []

    def route(self, requests):
        parts = [[r for r in requests if r.prompt[-1] % 2 == rest] for rest in (0, 1)]
        return [ReplicaRoute(name, part) for name, part in zip("ab", parts, strict=True) if part]

    def forget(self, episode):
        self.forgotten.append(episode)

    def avoid(self, replica_id):
        self.avoided.append(replica_id)

    async def generate(self, requests, replica_id=""):
        self.replicas.append(replica_id)
        async for completions in super().generate(requests, replica_id):
            yield completions


async def test_turns_travel_by_replica_in_calls_of_limited_size():
    client = Routed()
    batcher = TurnBatcher(client, coalesce_s=0.0, max_turns=4)
    of_episode = replace(request("e/0", 20), episode="e")
    await asyncio.gather(*(batcher.sample(request(f"r{i}", i)) for i in range(11)), batcher.sample(of_episode))
    calls = [(name, [r.prompt[-1] for r in call]) for name, call in zip(client.replicas, client.calls, strict=True)]
    assert calls == [("a", [0, 2, 4, 6]), ("a", [8, 10, 20]), ("b", [1, 3, 5, 7]), ("b", [9])]
    assert batcher.num_calls == 4
    await batcher.close()
    assert sorted(client.forgotten) == sorted(f"r{i}" for i in range(11))
    batcher.forget("e")
    assert client.forgotten[-1] == "e"


async def test_a_call_that_fails_takes_no_other_replicas_turns_along():
    client = Routed()
    client.errors = [RetryableError("died")]
    batcher = TurnBatcher(client, coalesce_s=0.0)
    answers = await asyncio.gather(*(batcher.sample(request(f"r{i}", i)) for i in range(4)), return_exceptions=True)
    assert [isinstance(each, RetryableError) for each in answers] == [True, False, True, False]
    assert set(client.avoided) == {"a"}


async def test_turns_that_can_not_be_routed_are_answered():
    class Lost(Routed):
        def route(self, requests):
            raise OSError(f"no controller for {len(requests)} turn(s)")

    client = Lost()
    batcher = TurnBatcher(client, coalesce_s=0.0)
    assert (await batcher.sample(request("r", 5))).token_ids[0] == 5
    assert client.replicas == [""]


async def test_unsent_turns_of_an_episode_that_is_over_name_it_no_more():
    client = Routed()
    batcher = TurnBatcher(client, coalesce_s=0.0)
    late = asyncio.create_task(batcher.sample(replace(request("e/0", 2), episode="e", continues=True)))
    await asyncio.sleep(0)
    batcher.forget("e")
    await late
    ((sent,),) = client.calls
    assert (sent.episode, sent.continues) == ("", False)
    await batcher.close()
    assert client.forgotten == ["e", "e/0"]


async def test_no_turn_waits_for_a_slower_neighbour():
    client = FakeGeneration(echo, delay_s=lambda r: 60.0 if r.request_id == "slow" else 0.0)
    batcher = TurnBatcher(client, coalesce_s=0.0)
    slow = asyncio.create_task(batcher.sample(request("slow")))
    async with asyncio.timeout(30):
        assert (await batcher.sample(request("fast"))).request_id == "fast"
        assert (await batcher.sample(request("next"))).request_id == "next"
    assert len(client.calls) == 2
    assert not slow.done()
    slow.cancel()
    await batcher.close()


async def test_calls_are_spaced_under_load_and_a_single_turn_is_immediate():
    client = FakeGeneration(echo)
    batcher = TurnBatcher(client, coalesce_s=2.0)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await batcher.sample(request("first"))
    assert loop.time() - began < 2.0

    async def later(i: int) -> None:
        await asyncio.sleep(0.01 * i)
        await batcher.sample(request(f"r{i}"))

    await asyncio.gather(*(later(i) for i in range(5)))
    assert [len(call) for call in client.calls] == [1, 5]
    assert loop.time() - began >= 2.0


async def test_an_error_reaches_each_turn_of_its_call_and_no_other():
    client = FakeGeneration(echo)
    client.errors = [RetryableError("gone")]
    batcher = TurnBatcher(client, coalesce_s=0.0)
    results = await asyncio.gather(*(batcher.sample(request(f"r{i}")) for i in range(3)), return_exceptions=True)
    assert all(isinstance(result, RetryableError) for result in results)
    assert (await batcher.sample(request("r3"))).request_id == "r3"


async def test_a_client_that_breaks_in_an_unknown_way_refuses_its_turns():
    client = FakeGeneration(echo)
    client.errors = [KeyError("surprise")]
    with pytest.raises(GenerationError, match="surprise"):
        await TurnBatcher(client, 0.0).sample(request("r"))


async def test_a_refused_turn_is_an_error_for_it_alone():
    class Refusing(FakeGeneration):
        def _complete(self, request: GenerateRequest) -> Completion:
            if request.request_id == "long":
                return Completion("long", error="prompt too long")
            return super()._complete(request)

    batcher = TurnBatcher(Refusing(echo), 0.0)
    good, bad = await asyncio.gather(
        batcher.sample(request("ok")), batcher.sample(request("long")), return_exceptions=True
    )
    assert isinstance(good, Completion)
    assert isinstance(bad, GenerationError)
    assert "prompt too long" in str(bad)


async def test_a_call_that_ends_without_an_answer_may_be_sent_again():
    class Forgetful(FakeGeneration):
        async def generate(self, requests, replica_id=""):
            async for completions in super().generate(requests, replica_id):
                yield [c for c in completions if c.request_id != "lost"]

    batcher = TurnBatcher(Forgetful(echo), 0.0)
    kept, lost = await asyncio.gather(
        batcher.sample(request("kept")), batcher.sample(request("lost")), return_exceptions=True
    )
    assert isinstance(kept, Completion)
    assert isinstance(lost, RetryableError)


async def test_a_turn_without_a_caller_is_aborted():
    client = FakeGeneration(echo, delay_s=lambda _: 60.0)
    batcher = TurnBatcher(client, coalesce_s=0.0)
    waiting = asyncio.create_task(batcher.sample(request("r")))
    await wait_until(lambda: bool(client.calls))
    waiting.cancel()
    await wait_until(lambda: client.aborted == ["r"])
    await batcher.close()


async def test_a_turn_that_was_not_sent_yet_is_taken_back_unsent():
    client = FakeGeneration(echo)
    batcher = TurnBatcher(client, coalesce_s=1.0)
    await batcher.sample(request("first"))
    waiting = asyncio.create_task(batcher.sample(request("second")))
    await asyncio.sleep(0)
    waiting.cancel()
    await batcher.sample(request("third"))
    assert [[r.request_id for r in call] for call in client.calls] == [["first"], ["third"]]
    assert client.aborted == []


async def test_late_turns_of_a_call_are_aborted_and_its_answers_used():
    client = FakeGeneration(echo, delay_s=lambda r: 60.0 if r.request_id == "slow" else 0.0)
    batcher = TurnBatcher(client, coalesce_s=0.0, timeout_s=0.5)
    fast, slow = await asyncio.gather(
        batcher.sample(request("fast")), batcher.sample(request("slow")), return_exceptions=True
    )
    assert isinstance(fast, Completion)
    assert isinstance(slow, TimeoutError)
    assert str(slow) == "no answer in 0.5 s"
    await wait_until(lambda: client.aborted == ["slow"])
    assert [len(call) for call in client.calls] == [2]
