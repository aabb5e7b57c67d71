"""What a publisher finds in Redis: a lease's epoch and the incarnation of the run's data."""

from redis import Redis

from offbeat.services.keys import RunKeys


def give_lease(redis: Redis, run_id: str, epoch: int) -> None:
    """Make `epoch` that of the newest lease, unless a newer one was given."""
    keys = RunKeys(run_id)
    if int(redis.get(keys.epoch) or 0) < epoch:  # type: ignore[arg-type]
        redis.set(keys.epoch, epoch)
    redis.set(keys.incarnation, "/1/server/nonce", nx=True)
