"""What a step's metrics say of groups that the buffer gave up."""

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.learner.expired_groups import ExpiredGroups
from offbeat.trainer.learner.group_intake import GroupIntake
from tests.services.buffer.buffer_play import Run, publish


async def test_groups_that_expire_while_they_are_played_are_of_the_next_step(redis_url: str):
    """Those of before its start are its predecessor's."""
    with Redis.from_url(redis_url) as redis:
        async with AsyncRedis.from_url(redis_url) as async_redis:
            run = Run.begin(redis, async_redis)
            await expire(run, step=3)
            intake = GroupIntake(run.learner, AlgorithmConfig(), 2, False, 100, expired=ExpiredGroups(run.learner))
            await run.complete_groups(2)
            assert dropped(intake, 3) == {}
            await expire(run, step=6)
            await run.complete_groups(2)
            assert dropped(intake, 6) == {"expired": 2}


async def expire(run: Run, step: int) -> None:
    """Claim two groups, and publish until no step can train them."""
    await run.buffer.claim("w", 4)
    publish(run.redis, step)
    await run.buffer.heartbeat("w")


def dropped(intake: GroupIntake, step: int) -> dict[str, int]:
    taken = intake.take(step, 1.0, lambda: False)
    assert taken is not None
    return taken.dropped
