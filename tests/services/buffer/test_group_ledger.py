"""The ledger on disk: complete whatever was trimmed in Redis, and exact after its writer died."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.services.buffer import group_ledger, learner_client, scripts
from offbeat.services.buffer.api import Admission
from offbeat.services.buffer.group_ledger import (
    LedgerFile,
    LedgerThread,
    LifeEvent,
    read_events_after,
    read_ledger,
)
from offbeat.services.buffer.scripts import BufferKeys
from tests.services.buffer.buffer_play import RUN, Run, limits
from tests.waiting import wait_until_sync


def kinds(folder: Path) -> list[tuple[int, str]]:
    return [(event.number, event.event) for event in read_ledger(folder)]


async def test_events_are_on_disk_though_redis_trimmed_them(run: Run, redis: Redis, tmp_path: Path):
    file = LedgerFile(tmp_path)
    await run.complete_groups(2)
    file.append(read_events_after(redis, RUN, file.position))
    redis.xtrim(BufferKeys(RUN).life, maxlen=0)
    await run.complete_groups(1)
    file.append(read_events_after(redis, RUN, file.position))
    assert kinds(tmp_path) == [(n, event) for n in range(3) for event in ("admitted", "submitted")]
    assert [event.ordinal for event in read_ledger(tmp_path)] == list(range(1, 7))


async def test_two_writers_leave_each_event_once(run: Run, redis: Redis, tmp_path: Path):
    await run.complete_groups(3)
    one, two = LedgerFile(tmp_path), LedgerFile(tmp_path)
    for file in (one, two):
        file.append(read_events_after(redis, RUN, file.position))
    assert len(read_ledger(tmp_path)) == 6
    assert LedgerFile(tmp_path).position == one.position == two.position


async def test_the_thread_follows_and_brings_the_rest_when_it_ends(run: Run, redis: Redis, tmp_path: Path):
    with LedgerThread(redis, RUN, tmp_path):
        await run.complete_groups(2)
        wait_until_sync(lambda: len(read_ledger(tmp_path)) == 4)
        await run.complete_groups(1)
    assert len(read_ledger(tmp_path)) == 6
    with LedgerThread(redis, RUN, tmp_path):
        pass
    assert len(read_ledger(tmp_path)) == 6


async def test_events_of_an_older_version_are_copied_and_reported(
    run: Run, redis: Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    redis.xadd(BufferKeys(RUN).life, {"n": 7, "e": "admitted", "d": "0"})
    with LedgerThread(redis, RUN, tmp_path):
        await run.complete_groups(1)
        wait_until_sync(lambda: len(read_ledger(tmp_path)) == 3)
    assert [(event.number, event.ordinal) for event in read_ledger(tmp_path)] == [(7, 0), (0, 1), (0, 2)]
    assert caplog.text.count("an older version of Offbeat") == 1


def test_an_event_comes_back_as_it_was(tmp_path: Path):
    event = LifeEvent("17-3", 1, 4, "dropped", 'a "reason"\n')
    LedgerFile(tmp_path).append([event])
    assert read_ledger(tmp_path) == [event]


async def test_a_disk_that_refuses_to_sync_does_not_end_the_copying(
    run: Run, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(_: LedgerFile) -> None:
        raise OSError(errno.EDQUOT, "over quota")

    monkeypatch.setattr(group_ledger, "SYNC_INTERVAL_S", 0.0)
    monkeypatch.setattr(LedgerFile, "sync", full)
    with LedgerThread(redis, RUN, tmp_path):
        for count in (2, 4):
            await run.complete_groups(1)
            wait_until_sync(lambda count=count: len(read_ledger(tmp_path)) == count)
    assert "over quota" in caplog.text


@pytest.fixture
def small_life(redis: Redis, async_redis: AsyncRedis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run whose Redis keeps 200 events at most, and 20 of those that were copied."""
    source, nodes = scripts.script_source, redis.config_get("stream-node-max-entries")

    def make_small(name: str) -> str:
        text = source(name).replace("LIFE_KEPT, LIFE_LIMIT = 100000, 1000000", "LIFE_KEPT, LIFE_LIMIT = 20, 200")
        assert "20, 200" in text
        return text

    monkeypatch.setattr(scripts, "script_source", make_small)
    monkeypatch.setattr(group_ledger, "SYNC_INTERVAL_S", 0.0)
    monkeypatch.setattr(learner_client, "ACK_SIZE", 25)
    monkeypatch.setattr(learner_client, "LEDGER_POLL_S", 0.01)
    scripts.script_digest.cache_clear()
    redis.config_set("stream-node-max-entries", 10)
    yield Run.begin(redis, async_redis, limits(max_staleness=1e6, max_groups_in_flight=10**6, total_groups=10**6))
    redis.config_set("stream-node-max-entries", nodes["stream-node-max-entries"])  # pyright: ignore[reportIndexIssue]
    scripts.script_digest.cache_clear()


def ordinals(folder: Path) -> list[int]:
    return [event.ordinal for event in read_ledger(folder)]


async def test_an_acknowledgement_of_any_size_loses_no_event(small_life: Run, redis: Redis, tmp_path: Path):
    """More groups than Redis keeps events, as with `save_steps` times rows above a million."""
    run, count = small_life, 300
    with LedgerThread(redis, RUN, tmp_path):
        for done in range(0, count, 50):
            await run.complete_groups(50)
            wait_until_sync(lambda done=done: len(read_ledger(tmp_path)) == 2 * (done + 50))
        taken = [run.learner.take(0, 16) for _ in range(count)]
        entry_ids = [group.entry_id for group in taken if group is not None]
        assert run.learner.ack(entry_ids, 1) == count
    assert ordinals(tmp_path) == list(range(1, 3 * count + 1))
    assert len(read_events_after(redis, RUN, "0")) < 60
    assert run.learner.counters().trained == count
    assert run.learner.counters().in_flight == 0


async def test_no_group_starts_while_many_events_are_not_copied(small_life: Run, redis: Redis, tmp_path: Path):
    """A learner that is away: Redis forgets no event, and groups start again once they are on disk."""
    run = small_life
    await run.complete_groups(200)
    before = run.learner.counters().admitted
    assert before < 100
    assert run.learner.snapshot().admission is Admission.LEDGER_BEHIND
    with LedgerThread(redis, RUN, tmp_path):
        wait_until_sync(lambda: run.learner.snapshot().admission is Admission.OPEN)
        await run.complete_groups(1)
    assert ordinals(tmp_path) == list(range(1, 2 * before + 3))


async def test_events_that_are_not_durable_stay(small_life: Run, redis: Redis):
    run = small_life
    await run.complete_groups(30)
    run.learner._run("trim", "1-1", 60)
    assert redis.xlen(BufferKeys(RUN).life) == 60, "an event that this Redis does not hold"
    newest = read_events_after(redis, RUN, "0")[29]
    assert run.learner._run("trim", newest.id, newest.ordinal) == 10
    assert read_events_after(redis, RUN, "0")[0].ordinal == 11


async def test_refilled_groups_leave_with_the_last_part(small_life: Run, redis: Redis, tmp_path: Path):
    run = small_life
    await run.complete_groups(40)
    taken = [group for _ in range(40) if (group := run.learner.take(0, 16)) is not None]
    run.learner.refill(taken[3], "zero_variance", 1)
    run.learner.refill(taken[39], "zero_variance", 1)
    entry_ids = [group.entry_id for group in taken if group not in (taken[3],)]
    with LedgerThread(redis, RUN, tmp_path):
        assert run.learner.ack(entry_ids, 1) == 39
    counters = run.learner.counters()
    assert (counters.trained, counters.dropped, counters.in_flight) == (39, {"zero_variance": 1}, 0)


async def test_a_ledger_that_does_not_follow_holds_the_learner_for_a_bounded_time(
    small_life: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_client, "LEDGER_TIMEOUT_S", 0.05)
    await small_life.complete_groups(40)
    taken = [small_life.learner.take(0, 16) for _ in range(40)]
    assert small_life.learner.ack([group.entry_id for group in taken if group is not None], 1) == 40
