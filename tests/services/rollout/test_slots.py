import asyncio

import pytest

from offbeat.services.messages.types import EpisodeKind
from offbeat.services.rollout.slots import Slot, SlotPool
from tests.waiting import wait_until

LONG_S = 30.0
"""Kind that no episode of these tests waits for."""


async def departed(*slots: Slot) -> list["asyncio.Task[None]"]:
    """Each place's episode is finished, and waits to leave."""
    leaving = [asyncio.create_task(place.finish_and_wait_for_flush()) for place in slots]
    await asyncio.sleep(0)
    return leaving


async def test_the_first_finished_episode_is_submitted_at_once():
    slots = SlotPool(3, gather_s=LONG_S)
    playing = [slots.take() for _ in range(3)]
    assert slots.num_free == 0
    async with asyncio.timeout(LONG_S / 2):
        await playing[0].finish_and_wait_for_flush()
        await slots.wait_for_free_slots()
    assert slots.num_free == 1


async def test_episodes_finishing_together_are_submitted_as_one_batch():
    """They are submitted before their slots are claimed again."""
    slots, order = SlotPool(3, gather_s=LONG_S), list[str]()

    async def play(name: str, place: Slot) -> None:
        await place.finish_and_wait_for_flush()
        order.append(name)

    async def claim() -> None:
        await slots.wait_for_free_slots()
        order.append(f"claim for {slots.num_free}")

    claiming = asyncio.create_task(claim())
    await asyncio.sleep(0)
    playing = [slots.take() for _ in range(3)]
    async with asyncio.timeout(LONG_S / 2):
        await asyncio.gather(play("a", playing[0]), play("b", playing[1]), claiming)
    assert order == ["a", "b", "claim for 2"]


async def test_an_early_finisher_waits_for_a_batch_while_episodes_run():
    slots = SlotPool(4, gather_s=LONG_S)
    playing = [slots.take() for _ in range(4)]
    await playing[0].finish_and_wait_for_flush()
    leaving = await departed(*playing[1:3])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await asyncio.shield(leaving[0])
    assert slots.num_free == 1
    leaving += await departed(playing[3])  # none is left to wait for
    async with asyncio.timeout(LONG_S / 2):
        await asyncio.gather(*leaving)
    assert slots.num_free == 4


async def test_a_departure_is_as_long_after_the_last_as_it_should_be():
    slots = SlotPool(3, gather_s=0.2)
    playing = [slots.take() for _ in range(3)]
    loop = asyncio.get_running_loop()
    await playing[0].finish_and_wait_for_flush()
    began = loop.time()
    await playing[1].finish_and_wait_for_flush()
    assert loop.time() - began >= 0.19  # the loop's clock ticks in milliseconds


async def test_an_episode_that_ends_without_a_trajectory_frees_its_place_once():
    slots = SlotPool(2, gather_s=0.0)
    failed, finished = slots.take(), slots.take()
    failed.leave()
    failed.leave()
    await slots.wait_for_free_slots()
    assert slots.num_free == 1
    await finished.finish_and_wait_for_flush()
    finished.leave()
    await slots.wait_for_free_slots()
    assert slots.num_free == 2


async def test_an_episode_cancelled_while_waiting_for_its_flush_blocks_no_other():
    slots = SlotPool(3, gather_s=LONG_S)
    first, second, third = (slots.take() for _ in range(3))
    await first.finish_and_wait_for_flush()
    cancelled, other = await departed(second, third)
    cancelled.cancel()
    second.leave()
    async with asyncio.timeout(LONG_S / 2):
        await other
    await wait_until(lambda: slots.num_free == 3)


async def test_more_episodes_than_places_leave_none_free():
    slots = SlotPool(1)
    given = [slots.take() for _ in range(3)]
    assert slots.num_free == 0
    await asyncio.gather(*(place.finish_and_wait_for_flush() for place in given[:2]))
    assert slots.num_free == 0
    given[2].leave()
    assert slots.num_free == 1


async def test_as_many_episodes_as_slots_may_wait_for_rewards_before_claims_shrink():
    slots = SlotPool(2, gather_s=LONG_S, limits={EpisodeKind.EVAL: 1})
    first = [slots.take() for _ in range(2)]
    for slot in first:
        slot.lend()
    assert (slots.num_free, slots.num_free_of(EpisodeKind.EVAL)) == (2, 1)
    second = [slots.take(), slots.take(EpisodeKind.EVAL)]
    assert slots.num_free == 0
    second[1].lend()
    assert (slots.num_free, slots.num_free_of(EpisodeKind.EVAL)) == (0, 0), "three wait for two slots"
    first[0].leave()
    assert slots.num_free == 1
    first[0].leave()
    assert slots.num_free == 1
    async with asyncio.timeout(LONG_S / 2):
        second[0].leave()
        await asyncio.gather(first[1].finish_and_wait_for_flush(), second[1].finish_and_wait_for_flush())
    assert (slots.num_free, slots.num_free_of(EpisodeKind.EVAL)) == (2, 1)


async def test_fewer_slots_let_running_episodes_finish_and_more_wake_the_claim():
    slots = SlotPool(3, gather_s=0.0)
    playing = [slots.take() for _ in range(3)]
    slots.resize(1)
    await playing[0].finish_and_wait_for_flush()
    await slots.wait_for_free_slots()
    assert (slots.num_running, slots.num_free) == (2, 0)
    claim = asyncio.create_task(slots.wait_for_free_slots())
    await asyncio.sleep(0)
    assert not claim.done()
    slots.resize(4)
    async with asyncio.timeout(LONG_S):
        await claim
    assert slots.num_free == 2


async def test_fewer_slots_let_as_many_episodes_wait_for_rewards_as_before():
    slots = SlotPool(3, gather_s=0.0)
    slots.resize(1)
    waiting: list[Slot] = []
    for _ in range(3):
        assert slots.num_free == 1
        waiting.append(slots.take())
        waiting[-1].lend()
    assert slots.num_free == 1
    waiting.append(slots.take())
    waiting[-1].lend()
    assert slots.num_free == 0, "four wait, of three that may"
    waiting[0].leave()
    assert slots.num_free == 1
