"""Groups without signal that a step replaces: others start at once, and who repeats the step meets the same groups again."""

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.buffer.api import Admission, Proof
from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.buffer.scores import RedisScoreQueue
from offbeat.services.errors import FencedError
from offbeat.services.messages.types import Group
from tests.services.buffer.buffer_play import RUN, Run, limits, run_uid


@pytest.fixture
def synchronous(redis: Redis, async_redis: AsyncRedis) -> Run:
    """Two groups a step, and none ahead."""
    return Run.begin(redis, async_redis, limits(max_staleness=0.0))


def take_one(learner: RedisLearnerBuffer) -> Group:
    group = learner.take(0)
    assert group is not None
    return group


def take_all(learner: RedisLearnerBuffer) -> list[int]:
    numbers = []
    while (group := learner.take(0)) is not None:
        numbers.append(group.number)
    return numbers


async def refill_first(run: Run) -> list[Group]:
    """Take the groups of step 1 and refill the first; return all, the one in its place included."""
    await run.complete_groups(2)
    groups = [take_one(run.learner), take_one(run.learner)]
    assert await run.buffer.claim("w", 9) == []
    for _ in range(2):  # as if the answer to the first call was lost
        run.learner.refill(groups[0], "no_signal", 1)
    await run.complete_groups(1)
    return [*groups, take_one(run.learner)]


async def test_another_group_starts_in_place_of_a_refilled_one(synchronous: Run):
    groups = await refill_first(synchronous)
    assert [group.number for group in groups] == [0, 1, 2]
    assert synchronous.learner.snapshot().admission is Admission.STALENESS_BOUND
    assert await synchronous.buffer.claim("w", 9) == []


async def test_a_refilled_group_is_dropped_with_the_checkpoint_of_its_step(synchronous: Run):
    refilled, *trained = await refill_first(synchronous)
    counters = synchronous.learner.counters()
    assert (counters.dropped, counters.in_flight, counters.refilled) == ({"no_signal": 1}, 2, 1)
    assert synchronous.learner.ack([group.entry_id for group in trained], 1) == 2
    counters = synchronous.learner.counters()
    assert (counters.trained, counters.dropped, counters.in_flight) == (2, {"no_signal": 1}, 0)
    assert counters.refilled == 0
    assert synchronous.keys_left("blobs") == synchronous.keys_left("refilled") == []
    assert synchronous.learner.ack([refilled.entry_id], 1) == 0
    life = await synchronous.watch.life()
    assert [(number, event) for number, event, _ in life if event in ("trained", "dropped")] == [
        (1, "trained"), (2, "trained"), (0, "dropped"),
    ]  # fmt: skip
    assert synchronous.learner.snapshot().admission is Admission.STALENESS_BOUND


async def test_a_refilled_group_of_a_later_step_outlives_the_checkpoint(run: Run):
    await run.complete_groups(4)
    first, second, third, fourth = (take_one(run.learner) for _ in range(4))
    run.learner.refill(third, "no_signal", 2)
    assert run.learner.ack([first.entry_id, second.entry_id], 1) == 2
    assert take_all(run.next_learner()) == [third.number, fourth.number]


@pytest.mark.parametrize("order", ["completion", "admission"])
async def test_a_successor_takes_the_refilled_groups_again_in_their_place(synchronous: Run, order: str):
    await refill_first(synchronous)
    successor = synchronous.next_learner(order)  # type: ignore[arg-type]
    successor.reconcile(Proof())
    assert await synchronous.buffer.claim("w", 9) == [], "not one group more, before it refills again"
    again = [take_one(successor) for _ in range(3)]
    assert [group.number for group in again] == [0, 1, 2]
    successor.refill(again[0], "no_signal", 1)
    assert await synchronous.buffer.claim("w", 9) == [], "the replacement is there"
    assert successor.ack([group.entry_id for group in again[1:]], 1) == 2
    counters = successor.counters()
    assert (counters.admitted, counters.trained, counters.dropped) == (3, 2, {"no_signal": 1})


async def test_a_successor_of_another_mind_trains_what_was_refilled(synchronous: Run):
    """Resumed with `zero_variance: mask`: the marks of its predecessor do not count."""
    await refill_first(synchronous)
    successor = synchronous.next_learner()
    successor.reconcile(Proof())
    again = [take_one(successor) for _ in range(2)]
    assert successor.ack([group.entry_id for group in again], 1) == 2
    counters = successor.counters()
    assert (counters.trained, counters.dropped, counters.in_flight) == (2, {}, 1)


async def test_a_learner_killed_between_its_checkpoint_and_the_acknowledgement(synchronous: Run):
    """The successor finds a durable checkpoint of step 1: no step sees its groups, refilled ones included, again."""
    await refill_first(synchronous)
    successor = synchronous.next_learner()
    proof = Proof(saved=[(1, [1, 2])], step=1, num_trained=2)
    assert successor.reconcile(proof).num_corrected == 3
    assert successor.reconcile(proof).num_corrected == 0
    assert take_all(successor) == []
    counters = successor.counters()
    assert (counters.admitted, counters.trained, counters.dropped) == (3, 2, {"no_signal": 1})
    assert synchronous.keys_left("blobs") == synchronous.keys_left("refilled") == []


async def test_a_replaced_learner_refills_nothing(synchronous: Run):
    await synchronous.complete_groups(1)
    old, group = synchronous.learner, take_one(synchronous.learner)
    synchronous.next_learner()
    with pytest.raises(FencedError):
        old.refill(group, "no_signal", 1)
    assert synchronous.keys_left("refilled") == []


async def test_a_dropped_group_is_not_replaced_twice(synchronous: Run):
    groups = await refill_first(synchronous)
    synchronous.learner.drop(groups[0], "stale")
    assert await synchronous.buffer.claim("w", 9) == []
    assert synchronous.learner.ack([group.entry_id for group in groups[1:]], 1) == 2
    assert synchronous.learner.counters().dropped == {"stale": 1}


async def test_closing_leaves_no_refilled_group(synchronous: Run):
    await refill_first(synchronous)
    assert synchronous.learner.close("unneeded") == 3
    assert synchronous.keys_left("refilled") == []


async def test_no_scorer_is_given_a_refilled_group(run: Run):
    await run.complete_groups(2)
    group = take_one(run.learner)
    run.learner.refill(group, "no_signal", 1)
    claim = RedisScoreQueue(run.redis, RUN, run_uid(run.redis), "a", "reference@0123456789ab", lease_s=30.0).claim()
    assert claim.num_missing == 1
    assert claim.claimed is not None
    assert claim.claimed.number == 1
