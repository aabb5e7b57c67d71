"""One admission rule: Python's and the one that Redis runs."""

from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from redis import Redis

from offbeat.services.buffer.admin import limit_fields
from offbeat.services.buffer.admission import GroupCounts, count_admissible, oldest_consumable
from offbeat.services.buffer.api import BufferLimits
from offbeat.services.buffer.scripts import FOLDER, SHARED, BufferKeys
from offbeat.services.redis.incarnation import ANY
from tests.copying import replace
from tests.services.buffer.buffer_play import limits

RUN = "admission"
SCRIPT = (
    "\n".join((FOLDER / f"{part}.lua").read_text() for part in SHARED)
    + """
local limits, step = read_limits(), tonumber(ARGV[1])
local room, limit = count_admissible(limits, step)
return {room, limit, step and oldest_consumable(limits, step) or 0}
"""
)
SMALL = st.integers(0, 40)
STALENESS = st.one_of(st.integers(0, 5).map(float), st.floats(0, 6, allow_nan=False))


@st.composite
def buffer_limits(draw: st.DrawFn) -> BufferLimits:
    return replace(
        limits(),
        groups_per_step=draw(st.integers(1, 9)),
        max_staleness=draw(STALENESS),
        max_groups_in_flight=draw(st.integers(1, 30)),
        total_groups=draw(st.integers(1, 400)),
    )


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bounds=buffer_limits(), step=st.none() | SMALL, room=st.integers(-3, 20), dropped=SMALL, failed=SMALL, playing=SMALL
)
@example(bounds=limits(max_staleness=0.5, groups_per_step=3), step=4, room=2, dropped=1, failed=1, playing=0)
def test_python_and_redis_admit_the_same_groups(
    redis: Redis, bounds: BufferLimits, step: int | None, room: int, dropped: int, failed: int, playing: int
):
    """room: groups that the staleness bound leaves, about; the other limits are drawn."""
    lookahead = round(((step or 0) + bounds.max_staleness + 1) * bounds.groups_per_step)
    admitted = max(lookahead - room + dropped + failed, 0)
    keys = BufferKeys(RUN)
    redis.delete(keys.limits, f"{keys.root}:ledger", f"{keys.root}:assembling")
    redis.hset(keys.limits, items=limit_fields(bounds))
    redis.hset(f"{keys.root}:ledger", mapping={"admitted": admitted, "dropped": dropped, "failed": failed})
    if playing:
        redis.zadd(f"{keys.root}:assembling", {str(number): 0 for number in range(playing)})
    arguments = ["" if step is None else step, ANY]
    reply: Any = redis.eval(SCRIPT, len(keys.script_keys), *keys.script_keys, *arguments)
    admissible, limit, oldest = reply

    counts = GroupCounts(standing=admitted - dropped - failed, playing=playing)
    assert count_admissible(bounds, step, counts) == (admissible, limit.decode())
    if step is not None:
        assert oldest_consumable(step, bounds.max_staleness) == oldest
