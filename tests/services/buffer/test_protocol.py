import os
import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from redis import Redis

from offbeat.services.redis.connection import connect
from tests.services.buffer.protocol_actors import NAMES
from tests.services.buffer.protocol_machine import Protocol

pytestmark = pytest.mark.slow


def machine_on(redis_url: str, redis: Redis, max_staleness: int = 1) -> type[Protocol]:
    return type("OnRedis", (Protocol,), {"redis": redis, "url": redis_url, "max_staleness": max_staleness})


@pytest.mark.timeout(600)  # a failure is shrunk to few steps, which takes its time
def test_nothing_is_lost_and_nothing_trained_twice_whatever_dies_when(redis_url: str):
    with connect(redis_url) as redis:
        run_state_machine_as_test(
            machine_on(redis_url, redis),
            settings=settings(
                max_examples=int(os.environ.get("OFFBEAT_PROTOCOL_EXAMPLES", "60")),
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            ),
        )


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("losses", [0, 2], ids=["", "with losses of Redis"])
def test_long_lives_full_of_deaths_end_complete(redis_url: str, seed: int, max_staleness: int, losses: int):
    """The same machine, driven by a seeded walk that gets further into a run than hypothesis does."""
    walk = random.Random(seed)
    with connect(redis_url) as redis:
        machine = machine_on(redis_url, redis, max_staleness)()

        def name() -> str:
            return walk.choice(NAMES)

        def pick() -> int:
            return walk.randrange(99)

        actions: list[tuple[int, Callable[[], object]]] = [
            (12, lambda: machine.learner_goes_on(walk.randint(1, 6))),
            (10, lambda: machine.submit(name(), pick(), walk.randint(0, 1))),
            (6, lambda: machine.claim(name(), walk.randint(1, 7), walk.random() < 0.2)),
            (4, lambda: machine.play_on(name(), walk.randint(0, 3))),
            (4, lambda: machine.fail(name(), pick())),
            (3, lambda: machine.heartbeat(name())),
            (2, lambda: machine.submit_again(pick())),
            (2, lambda: machine.worker_dies(name(), walk.random() < 0.5)),
            (2, lambda: machine.submit_from_a_worker_thought_dead(pick(), 0) if machine.ghosts else None),
            (1, lambda: machine.release(name())),
            (1, lambda: machine.learner.start_up or machine.acknowledge()),
            (1, lambda: machine.learner.start_up or machine.evaluate()),
            (1, machine.learner_crashes),
            (1, lambda: machine.is_leased() and machine.a_second_learner_waits()),
            (losses, machine.redis_is_copied),
            (losses, lambda: machine.redis_comes_back_at_an_earlier_state(pick())),
            (1, lambda: machine.ledger_is_copied(walk.randrange(40))),
            (1, lambda: machine.a_replaced_learner_writes(walk.randrange(7)) if machine.zombie else None),
        ]
        weights = [weight for weight, _ in actions]
        try:
            for _, action in walk.choices(actions, weights, k=120):
                action()
                machine.the_ledger_adds_up()
                machine.versions_only_grow()
                machine.each_member_is_in_one_place()
                machine.no_group_is_trained_twice()
        finally:
            machine.teardown()
