"""Claims of runs on generation applications that the deploy file has, of a synchronous caller.

Invariant: a claim is added only beside runs that it fits, in one transaction.
"""

from typing import cast

from redis import Redis
from redis.client import Pipeline

from offbeat.services.control.claims import Holder, find_conflict
from offbeat.services.control.run import RunState
from offbeat.services.errors import ControlError
from offbeat.services.generation.tenancy import APP
from offbeat.services.keys import RunKeys, claims_key, join_claim, slots_key, split_claim

CLAIMS, SLOTS = claims_key(APP), slots_key(APP)
LOST = "without a record"


def find_app_conflict(redis: Redis, app: str, run_id: str, base: str) -> str:
    """Return why a run can't use an application beside the active runs that do; empty if it can."""
    others = [holder for holder in _other_holders(redis, app, run_id) if holder.state != LOST]
    return find_conflict(APP, app, others, slots=_count_slots(redis, app), base=base)


def read_claim(redis: Redis, app: str) -> list[str]:
    """Return the runs that have claimed an application."""
    return split_claim(cast(bytes | None, redis.hget(CLAIMS, app)))


def claim_app(redis: Redis, app: str, run_id: str) -> None:
    """Claim an application, unless the run has; raises `ControlError` if others leave no room."""

    def claim(pipe: Pipeline) -> None:
        if run_id in read_claim(pipe, app):
            return
        base = cast(bytes | None, pipe.hget(RunKeys(run_id).record, "base")) or b""
        others = _other_holders(pipe, app, run_id)
        if conflict := find_conflict(APP, app, others, slots=_count_slots(pipe, app), base=base.decode()):
            raise ControlError(conflict)
        pipe.multi()
        pipe.hset(CLAIMS, app, join_claim([*(holder.run_id for holder in others), run_id]))

    redis.transaction(claim, CLAIMS, SLOTS)


def release_app(redis: Redis, app: str, run_id: str) -> None:
    """Give a claim back, if the run has one; others keep theirs."""

    def release(pipe: Pipeline) -> None:
        held = read_claim(pipe, app)
        left = [each for each in held if each != run_id]
        if left == held:
            return
        pipe.multi()
        if left:
            pipe.hset(CLAIMS, app, join_claim(left))
        else:
            pipe.hdel(CLAIMS, app)

    redis.transaction(release, CLAIMS)


def _count_slots(redis: Redis, app: str) -> int:
    return int(cast(bytes | None, redis.hget(SLOTS, app)) or 1)


def _other_holders(redis: Redis, app: str, run_id: str) -> list[Holder]:
    """Return the other runs that have claimed an application and are not over; one without a record may be restored."""
    holders: list[Holder] = []
    for other in read_claim(redis, app):
        state, base = cast(list[bytes | None], redis.hmget(RunKeys(other).record, ["state", "base"]))
        if other != run_id and (state is None or not RunState(state.decode()).is_terminal):
            holders.append(Holder(other, state.decode() if state else LOST, (base or b"").decode()))
    return holders
