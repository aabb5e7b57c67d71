"""The ledger on disk: complete whatever was trimmed in Redis, and exact after its writer died."""

import errno
from pathlib import Path

import pytest
from redis import Redis

from offbeat.services.buffer import group_ledger
from offbeat.services.buffer.group_ledger import (
    LedgerFile,
    LedgerThread,
    LifeEvent,
    read_events_after,
    read_ledger,
)
from offbeat.services.buffer.scripts import BufferKeys
from tests.services.buffer.buffer_play import RUN, Run
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
