"""A run with many changes of its settings shows the newest ones, under the settings of all."""

import asyncio
from collections.abc import Mapping
from typing import Any, cast

from offbeat.services.control.recent_changes import FOLDED_AT_ONCE, MAX_RECENT_CHANGES
from offbeat.services.control.store import RunStore
from offbeat.services.keys import RunKeys
from offbeat.services.live_settings import encode_change
from tests.copying import replace
from tests.services.control.test_store import SETTINGS, SPEC

NUM = 1000


async def request(store: RunStore, *values: Mapping[str, float], adopted: bool = True) -> None:
    keys = RunKeys("lake")
    for each in values:
        place = await cast(Any, store.redis.rpush(keys.changes, encode_change(each, 1.0))) - 1
        if adopted:
            await cast(Any, store.redis.hset(keys.adopted, str(place), place))


async def test_only_the_newest_changes_are_read_again(store: RunStore) -> None:
    record, _ = await store.create(SPEC)
    await request(store, {"num_workers": 9}, *({"num_env_groups": i + 1} for i in range(NUM)))
    expected = replace(SETTINGS, num_workers=9, num_env_groups=NUM)
    for _ in range(3):
        changes = await store.recent_changes("lake")
        assert len(changes.newest) <= MAX_RECENT_CHANGES + FOLDED_AT_ONCE
        assert changes.newest[-1].values == {"num_env_groups": NUM}
        assert changes.newest[-1].step == NUM
        assert changes.settings(record.settings) == expected == await store.settings(record)
    await request(store, {"num_replicas": 5}, {"temperature": 0.5}, adopted=False)
    assert await store.settings(record) == replace(expected, num_replicas=5)
    assert [change.step for change in (await store.recent_changes("lake")).newest[-2:]] == [None, None]


async def test_changes_that_no_step_has_adopted_stay_whole(store: RunStore) -> None:
    record, _ = await store.create(SPEC)
    await request(store, *({"num_env_groups": i + 1} for i in range(NUM)), adopted=False)
    assert len((await store.recent_changes("lake")).newest) == NUM
    assert await store.settings(record) == SETTINGS


async def test_changes_of_a_redis_that_lost_some_are_read_anew(store: RunStore) -> None:
    record, _ = await store.create(SPEC)
    await request(store, {"num_workers": 9}, *({"num_env_groups": i + 1} for i in range(NUM)))
    await store.recent_changes("lake")
    keys = RunKeys("lake")
    await cast(Any, store.redis.delete(keys.changes, keys.adopted))
    assert await asyncio.gather(*(store.settings(record) for _ in range(3))) == 3 * [SETTINGS]
    await request(store, {"num_workers": 3})
    assert await store.settings(record) == replace(SETTINGS, num_workers=3)
