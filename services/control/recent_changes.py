"""Newest changes of a run's settings, so that a view of a run with thousands of them reads only these."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from redis.asyncio import Redis

from offbeat.services.keys import RunKeys
from offbeat.services.live_settings import Change, Settings, decode_change, merge, settings_now

MAX_RECENT_CHANGES, FOLDED_AT_ONCE = 100, 20
"""Changes that are read again at each call, up to their sum; the staleness controller makes thousands."""


@dataclass(frozen=True, slots=True)
class EarlierChanges:
    """Adopted changes before the newest ones."""

    num: int = 0
    last: bytes = b""
    values: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class RecentChanges:
    earlier: Mapping[str, float]
    """Values of adopted changes before `newest`."""
    newest: list[Change]

    def settings(self, base: Settings) -> Settings:
        """Return the settings in force."""
        return settings_now(base.changed(self.earlier), self.newest)


async def read_recent_changes(redis: Redis, run_id: str, earlier: dict[str, EarlierChanges]) -> RecentChanges:
    """Read a run's changes after those in `earlier`, to which older ones are moved."""
    keys, known = RunKeys(run_id), earlier.get(run_id, EarlierChanges())
    async with redis.pipeline(transaction=False) as pipe:
        pipe.lindex(keys.changes, known.num - 1 if known.num else 0)
        pipe.lrange(keys.changes, known.num, -1)
        last, blobs = await pipe.execute()
    if known.num and last != known.last:  # of another run, or of a Redis that lost some
        if earlier.get(run_id) is known:  # else another call was first
            del earlier[run_id]
        return await read_recent_changes(redis, run_id, earlier)
    places = [str(known.num + i) for i in range(len(blobs))]
    steps = await cast(Any, redis.hmget(keys.adopted, places)) if places else []
    changes = [
        decode_change(blob, None if step is None else int(step)) for blob, step in zip(blobs, steps, strict=True)
    ]
    num_adopted = next((i for i, change in enumerate(changes) if change.step is None), len(changes))
    num = min(len(changes) - MAX_RECENT_CHANGES, num_adopted)
    if num >= FOLDED_AT_ONCE:
        values = merge([Change(dict(known.values)), *changes[:num]])
        known, changes = EarlierChanges(known.num + num, blobs[num - 1], values), changes[num:]
        earlier[run_id] = known
    return RecentChanges(known.values, changes)
