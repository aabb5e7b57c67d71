"""Reconciling after a long run: what Redis can no longer know is neither sent nor looked up."""

from typing import Any

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.buffer.api import Proof
from offbeat.services.keys import RunKeys
from tests.services.buffer.buffer_play import RUN, Run, limits

STEPS = 20_000
LEDGER = f"{RunKeys(RUN).key('buffer')}:ledger"


def proof(steps: int) -> Proof:
    saved = [(step, [2 * step - 2, 2 * step - 1]) for step in range(1, steps + 1)]
    return Proof(saved=saved, step=steps, num_trained=2 * steps, next_number=2 * steps)


@pytest.fixture
def run(redis: Redis, async_redis: AsyncRedis) -> Run:
    run = Run.begin(redis, async_redis, limits(total_groups=1_000_000), step=STEPS)
    num = 2 * STEPS
    redis.hset(LEDGER, mapping={"admitted": num, "submitted": num, "trained": num, "next": num})
    return run


def sizes_of(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of proofs, as they are sent."""
    sizes: list[int] = []
    call = run.learner._run

    def send(name: str, *arguments: Any, **options: Any) -> Any:
        sizes.append(sum(len(each) for each in arguments if isinstance(each, bytes)))
        return call(name, *arguments, **options)

    monkeypatch.setattr(run.learner, "_run", send)
    return sizes


async def test_only_groups_that_redis_may_hold_are_sent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The acknowledgement of a step was lost, and the next step's groups are in flight."""
    await run.complete_groups(3)
    sizes = sizes_of(run, monkeypatch)
    result = run.learner.reconcile(proof(STEPS + 1))
    counters = run.learner.counters()
    assert (result.num_added, result.num_corrected) == (0, 2)
    assert (counters.admitted, counters.trained, counters.in_flight) == (2 * STEPS + 3, 2 * STEPS + 2, 1)
    assert max(sizes) < 1000


async def test_an_emptied_redis_gets_all(run: Run, redis: Redis) -> None:
    redis.delete(LEDGER)
    assert run.learner.reconcile(proof(STEPS)).num_corrected == 2 * STEPS
    counters = run.learner.counters()
    assert (counters.admitted, counters.trained, counters.dropped, counters.in_flight) == (2 * STEPS, 2 * STEPS, {}, 0)
    assert {task.number for task in await run.buffer.claim("w", 2)} == {2 * STEPS}


async def test_data_that_are_lost_between_the_question_and_the_proof_are_sent(
    run: Run, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, calls = run.learner._run, 0

    def send(name: str, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += name == "reconcile"
        if calls == 2:
            redis.delete(LEDGER)
        return call(name, *arguments, **options)

    monkeypatch.setattr(run.learner, "_run", send)
    assert run.learner.reconcile(proof(STEPS)).num_corrected == 2 * STEPS
    assert calls == 3
    assert run.learner.counters().dropped == {}
