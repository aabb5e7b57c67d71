"""The simulation and the real buffer in step: what starts when, and what the learner gets, drops and trains."""

from typing import Any

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.deploy.plan.simulation import Simulation
from offbeat.services.buffer.admission import oldest_consumable
from offbeat.services.buffer.api import BufferLimits
from offbeat.services.buffer.config import Order
from offbeat.services.messages.types import EpisodeTask
from tests.deploy.plan.settings import measures_of, setup_with
from tests.services.buffer.buffer_play import Run, publish

Entry = tuple[Any, ...]


class Traced(Simulation):
    """A simulation that writes down what it does to the buffer."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.log: list[Entry] = []
        self._begun: list[tuple[int, int]] = []

    def _claim(self) -> None:
        self._begun = []
        super()._claim()
        self.log.append(("claim", tuple(self._begun), self._free))

    def _begin(self, member: Any) -> None:
        self._begun.append((member.group.number, member.group.members.index(member)))
        super()._begin(member)

    def _submit(self, member: Any) -> None:
        if member.is_held and not member.group.is_over:
            self.log.append(("submit", member.group.number, member.group.members.index(member)))
        super()._submit(member)

    def _announce(self, step: int) -> None:
        self.log.append(("publish", step))
        super()._announce(step)

    def _take(self) -> None:
        ready = {group.number for _, group in self._ready}
        super()._take()
        if gone := ready - {group.number for _, group in self._ready}:
            self.log.append(("take", tuple(sorted(gone)), self._batch))


class Player:
    """Does to the real buffer what the simulation did to its own, and compares."""

    def __init__(self, run: Run, limits: BufferLimits) -> None:
        self._run = run
        self._limits = limits
        self._tasks: dict[tuple[int, int], EpisodeTask] = {}
        self.num_admitted = 0

    async def play(self, redis: Redis, log: list[Entry]) -> None:
        for kind, *rest in log:
            match kind:
                case "claim":
                    await self._claim(*rest)
                case "submit":
                    await self._run.submit(self._tasks[rest[0], rest[1]])
                case "publish":
                    publish(redis, rest[0])
                    await self._run.buffer.heartbeat("w")
                case _:
                    self._take(*rest)

    async def _claim(self, begun: tuple[tuple[int, int], ...], free: int) -> None:
        tasks = await self._run.buffer.claim("w", len(begun) + free)
        assert [(task.number, task.index) for task in tasks] == list(begun)
        self._tasks |= {(task.number, task.index): task for task in tasks}
        self.num_admitted = max([self.num_admitted, *(task.number + 1 for task in tasks)])

    def _take(self, numbers: tuple[int, ...], batch: int) -> None:
        """Take as many groups; drop what a learner refuses."""
        taken = [self._run.learner.take(2.0) for _ in numbers]
        assert sorted(group.number for group in taken if group) == list(numbers)
        for group in taken:
            assert group is not None
            oldest = oldest_consumable(batch, self._limits.max_staleness)
            if self._limits.stale_policy == "drop" and group.oldest_version < oldest:
                self._run.learner.drop(group, "stale")


@pytest.mark.parametrize("order", ["completion", "admission"])
@pytest.mark.parametrize(
    ("max_staleness", "redundancy", "stale_policy", "slots"),
    [(0.0, 0, "drop", 64), (1.0, 1, "drop", 23), (1.5, 0, "drop", 80), (1.0, 2, "train", 40), (3.0, 1, "drop", 9)],
)
async def test_the_simulated_buffer_does_what_the_real_one_does(
    redis: Redis,
    async_redis: AsyncRedis,
    order: Order,
    max_staleness: float,
    redundancy: int,
    stale_policy: str,
    slots: int,
):
    setup = setup_with(
        order=order, slots=slots, max_staleness=max_staleness, redundancy=redundancy, stale_policy=stale_policy,
        total_groups=100_000,
    )  # fmt: skip
    simulated = Traced(setup, measures_of(env_s="lognormal:0.25:0.6", train_s=0.3, announce_s=0.02), 1)
    outcome = simulated.run(12, 2)
    run = Run.begin(redis, async_redis, setup.limits)
    run.next_learner(order)
    player = Player(run, setup.limits)
    await player.play(redis, simulated.log)
    assert player.num_admitted >= 12 * setup.limits.groups_per_step
    dropped = run.learner.counters().dropped
    assert dropped == {reason: count for reason, count in outcome.dropped.items() if count}
