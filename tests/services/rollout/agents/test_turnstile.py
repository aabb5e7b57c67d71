"""A worker's share of what may be under way, also when the number of workers changes."""

import asyncio

from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.envs.pool import EnvPool

TAG = "Lake"


def pool_of(bound: int, num_workers: int = 1) -> EnvPool:
    return EnvPool({TAG: CustomEnv(env_type="frozen_lake", max_env_step_concurrent=bound)}, 1, num_workers)


class Crowd:
    """Calls that go through a turnstile and stay until they are let go."""

    def __init__(self, pool: EnvPool) -> None:
        self._pool = pool
        self._leave: list[asyncio.Event] = []
        self.inside: list[int] = []
        self.calls: list[asyncio.Task[None]] = []

    async def arrive(self, count: int) -> None:
        for _ in range(count):
            self._leave.append(asyncio.Event())
            self.calls.append(asyncio.create_task(self._call(len(self.calls))))
        await settle()

    async def flush(self, *numbers: int) -> None:
        for number in numbers:
            self._leave[number].set()
        await settle()

    async def _call(self, number: int) -> None:
        async with self._pool.step_limiter(TAG):
            self.inside.append(number)
            try:
                await self._leave[number].wait()
            finally:
                self.inside.remove(number)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_calls_go_through_in_their_order_as_many_as_the_share_allows():
    crowd = Crowd(pool_of(6, num_workers=2))
    await crowd.arrive(7)
    assert crowd.inside == [0, 1, 2]
    await crowd.flush(1)
    assert crowd.inside == [0, 2, 3]
    await crowd.flush(*range(7))
    assert crowd.inside == []


async def test_the_share_follows_the_number_of_workers():
    pool = pool_of(6)
    crowd = Crowd(pool)
    await crowd.arrive(12)
    assert len(crowd.inside) == 6
    pool.share_with(3)
    await crowd.flush(0, 1, 2, 3)
    assert crowd.inside == [4, 5], "running ones continue, and no other enters"
    await crowd.flush(4)
    assert crowd.inside == [5, 6]
    pool.share_with(1)
    await settle()
    assert crowd.inside == [5, 6, 7, 8, 9, 10]
    pool.share_with(100)
    await crowd.flush(*range(11))
    assert crowd.inside == [11], "one is always let through"
    await crowd.flush(11)


async def test_who_gives_up_leaves_its_place_to_others():
    crowd = Crowd(pool_of(1))
    await crowd.arrive(4)
    crowd.calls[1].cancel()
    await crowd.flush(0)
    assert crowd.inside == [2]
    crowd.calls[2].cancel()
    await settle()
    assert crowd.inside == [3]
    await crowd.flush(3)
    assert crowd.inside == []
