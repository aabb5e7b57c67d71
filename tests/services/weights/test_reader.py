"""A share that hangs: a FIFO in place of a version's file keeps who opens it as long as it has no writer."""

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from msgspec import structs
from redis.asyncio import Redis

from offbeat.services.errors import WeightsError
from offbeat.services.generation import replica
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.replica import GenerationReplica
from offbeat.services.keys import RunKeys
from offbeat.services.messages.codec import encode_manifest
from offbeat.services.messages.types import (
    BaseVersion,
    Completion,
    GenerateRequest,
    Manifest,
    Sampling,
)
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.reader import MAX_HUNG_READS, MIN_BYTES_PER_S, WeightReader
from offbeat.services.weights.replica_reports import ReplicaReport, decode_report
from offbeat.services.weights.subscriber import RedisWeightSubscriber
from offbeat.services.weights.transports.base import file_name
from offbeat.services.weights.transports.shm import SharedMemoryTransport
from tests.services.generation.generation_fakes import FakeEngine
from tests.waiting import wait_until

RUN = "reading"
KEYS = RunKeys(RUN)
NOTHING = f"blake3:{blake3(b'').hexdigest()}"
"""Versions here are empty files: a FIFO's size is 0, too."""
FETCH_TIMEOUT_S = 1.5
"""Of a read in a new thread, on a loaded machine."""


class Share(SharedMemoryTransport):
    """A folder of which a test says where it hangs."""

    looking_hangs: Path | None = None

    def readable(self, manifest: Manifest) -> bool:
        if self.looking_hangs:
            self.looking_hangs.open("rb").close()
        return super().readable(manifest)


class Mesh:
    """A replica with a fake engine that follows a real Redis, and what a learner does to the two."""

    def __init__(self, async_redis: Redis, folder: Path, timeout_s: float) -> None:
        self.redis: Any = async_redis
        self.folder = folder
        self.share = Share(RUN, folder)
        config = WeightsConfig(transport="fs", url=str(folder), fetch_timeout_s=timeout_s)
        self.subscriber = RedisWeightSubscriber(async_redis, RUN, config, folder)
        self.subscriber._transport = self.share
        self.engine = FakeEngine()
        self.replica = GenerationReplica("r", self.engine, self.subscriber, GenerationConfig())
        self.following: asyncio.Task[None] | None = None

    def follow(self) -> None:
        self.following = asyncio.create_task(self.replica.follow())

    async def announce(self, version: int, *, hangs: bool) -> Path:
        path = self.folder / file_name(RUN, version, 1)
        os.mkfifo(path) if hangs else path.touch()
        manifest = Manifest(RUN, version, version, 1, "shm", str(path), NOTHING, 0, (), 0.0)
        await self.redis.hset(KEYS.manifests, str(version), encode_manifest(manifest))
        await self.redis.xadd(KEYS.versions, {"version": version})
        return path

    async def serves(self, version: int) -> None:
        await wait_until(lambda: self.replica.status()["version"] == version)

    async def refuses(self) -> None:
        """Wait until a version was refused since the metrics were taken."""
        await wait_until(lambda: self.replica.take_metrics().values["refused_weights"].value > 0)

    async def answer(self) -> Completion:
        request = GenerateRequest("a", (1, 2), Sampling())
        calls = aiter(self.replica.generate([request]))
        answering = asyncio.ensure_future(anext(calls))
        await wait_until(lambda: "a" in self.engine.asked)
        self.engine.finish("a")
        (completion,) = await answering
        return completion

    async def reported(self) -> ReplicaReport:
        await self.replica.report()
        return decode_report(await self.redis.hget(KEYS.served, "r"))

    async def close(self) -> None:
        if self.following:
            self.following.cancel()
            await asyncio.wait_for(asyncio.gather(self.following, return_exceptions=True), 30)


def threads() -> int:
    return sum(thread.name == "weights" for thread in threading.enumerate())


def held_open(folder: Path) -> list[str]:
    """Files of the folder that this process has open."""
    found: list[str] = []
    for each in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(each))
        except FileNotFoundError:
            continue
    return [path for path in found if path.startswith(str(folder))]


def let_go(fifo: Path) -> None:
    """Let whoever hangs at the FIFO see an empty file."""
    try:
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:  # no reader hangs there
        return


@pytest.fixture
async def mesh(async_redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    monkeypatch.setattr(replica, "FOLLOW_TIMEOUT_S", 0.1)
    monkeypatch.setattr(replica, "RETRY_INTERVAL_S", 0.01)
    mesh = Mesh(async_redis, tmp_path, FETCH_TIMEOUT_S)
    yield mesh
    await mesh.close()

    def no_reader_hangs() -> bool:
        for path in tmp_path.iterdir():
            if path.is_fifo():
                let_go(path)
        return threads() == 0

    await wait_until(no_reader_hangs)
    assert held_open(tmp_path) == []


async def test_a_replica_with_a_hung_share_serves_and_reports_its_old_version(mesh: Mesh) -> None:
    """It loads the next one that it can read."""
    mesh.follow()
    await mesh.announce(1, hangs=False)
    await mesh.serves(1)
    mesh.replica.take_metrics()
    began = time.time()
    await mesh.announce(2, hangs=True)
    await mesh.refuses()
    assert (await mesh.answer()).versions[0].version == 1
    await mesh.replica.check_health()
    reported = await mesh.reported()
    assert reported.fetching is not None
    assert (reported.version, reported.fetching.version, reported.fetching.source) == (1, 2, f"shm:{mesh.folder}")
    assert began <= reported.fetching.since <= time.time() - FETCH_TIMEOUT_S
    await asyncio.sleep(0.5)  # several looks for something newer
    assert threads() == 1, "no second read is begun beside the one that hangs"
    await mesh.announce(3, hangs=False)
    await mesh.serves(3)
    assert (await mesh.reported()).fetching is None
    await wait_until(lambda: threads() == 1)


async def test_a_version_whose_read_hung_is_read_again_once_that_has_come_back(mesh: Mesh) -> None:
    mesh.follow()
    fifo = await mesh.announce(1, hangs=True)
    await mesh.refuses()
    writing = os.open(fifo, os.O_WRONLY)
    whole = mesh.folder / "whole"
    whole.touch()
    whole.rename(fifo)
    assert threads() == 1
    os.close(writing)
    await mesh.serves(1)
    assert mesh.engine.loads == [1], "what came back late was not loaded"
    await wait_until(lambda: held_open(mesh.folder) == [])


async def test_a_replica_starts_beside_a_hung_share(mesh: Mesh) -> None:
    await mesh.announce(1, hangs=False)
    await mesh.announce(2, hangs=True)
    await asyncio.wait_for(mesh.replica.catch_up(), 30)
    assert mesh.replica.status()["version"] == -1
    mesh.follow()
    await mesh.serves(1)


async def test_looking_whether_bytes_are_there_may_hang_too(mesh: Mesh) -> None:
    mesh.share.looking_hangs = mesh.folder / "door"
    os.mkfifo(mesh.share.looking_hangs)
    await mesh.announce(1, hangs=False)
    await asyncio.wait_for(mesh.replica.catch_up(), 30)
    mesh.follow()
    reported = await mesh.reported()
    assert reported.fetching is not None
    assert reported.fetching.version == 1
    door, mesh.share.looking_hangs = mesh.share.looking_hangs, None
    let_go(door)
    await mesh.serves(1)


async def test_abandoned_reads_are_limited_and_recover(mesh: Mesh) -> None:
    mesh.follow()
    fifos = [await mesh.announce(version, hangs=True) for version in range(1, MAX_HUNG_READS + 1)]
    await wait_until(lambda: threads() == MAX_HUNG_READS)
    await mesh.announce(9, hangs=False)
    mesh.replica.take_metrics()
    await mesh.refuses()
    await mesh.refuses()
    assert (threads(), mesh.replica.status()["version"]) == (MAX_HUNG_READS, -1)
    let_go(fifos[0])
    await mesh.serves(9)


async def test_an_opened_version_commits_only_if_the_caller_succeeds() -> None:
    """An adapter's base counts as held by the engine after that alone."""
    may_open, ends, reader = threading.Event(), list[str](), WeightReader(0.1)
    manifest = Manifest(RUN, 1, 1, 1, "shm", "/share/v1", NOTHING, 0, (), 0.0)

    @contextmanager
    def opened() -> Iterator[int]:
        may_open.wait()
        try:
            yield 7
        except BaseException:
            ends.append("badly")
            raise
        ends.append("well")

    with pytest.raises(WeightsError, match=r"within 0\.1 s from shm:/share"):
        async with reader.open(manifest, opened()):
            raise AssertionError("it was not opened")
    assert reader.hangs(1)
    may_open.set()
    await wait_until(lambda: not reader.hangs(1))
    assert ends == ["badly"], "it was opened late, and closed without a waiter"
    reader = WeightReader(60)
    with pytest.raises(KeyError, match="the engine"):
        async with reader.open(manifest, opened()):
            raise KeyError("the engine")
    async with reader.open(manifest, opened()) as value:
        assert value == 7
    assert ends == ["badly", "badly", "well"]


async def test_the_time_to_read_counts_the_base_of_a_version(mesh: Mesh) -> None:
    may_open = threading.Event()

    class SlowShare(Share):
        @contextmanager
        def fetch(self, manifest: Manifest) -> Iterator[Path]:
            may_open.wait(0.5 if manifest.anchor else None)
            yield Path(manifest.location)

    mesh.subscriber._transport = SlowShare(RUN, mesh.folder)
    mesh.subscriber._reader = WeightReader(0.05)
    base = BaseVersion("/share/v0", NOTHING, 10 * MIN_BYTES_PER_S)
    adapter = Manifest(RUN, 1, 1, 1, "shm", "/share/v1", NOTHING, 0, (), 0.0, anchor=base)
    async with mesh.subscriber.fetch(adapter) as path:
        assert path == Path("/share/v1")
    with pytest.raises(WeightsError, match=r"within 0\.05 s"):
        async with mesh.subscriber.fetch(structs.replace(adapter, anchor=None)):
            raise AssertionError("it was not opened")
    may_open.set()


async def test_a_replica_ends_at_once_while_a_read_hangs(async_redis: Redis, tmp_path: Path) -> None:
    mesh = Mesh(async_redis, tmp_path, timeout_s=600)
    mesh.follow()
    fifo = await mesh.announce(1, hangs=True)
    await wait_until(lambda: threads() == 1)
    await mesh.close()
    let_go(fifo)
    await wait_until(lambda: threads() == 0)
    assert held_open(tmp_path) == []


def test_a_process_ends_while_a_read_hangs(tmp_path: Path) -> None:
    fifo = tmp_path / file_name(RUN, 1, 1)
    os.mkfifo(fifo)
    program = textwrap.dedent("""
        import asyncio, sys
        from pathlib import Path
        from offbeat.services.errors import WeightsError
        from offbeat.services.messages.types import Manifest
        from offbeat.services.weights.reader import WeightReader
        from offbeat.services.weights.transports.shm import SharedMemoryTransport

        async def main(path):
            manifest = Manifest("reading", 1, 1, 1, "shm", str(path), "", 0, (), 0.0)
            transport, reader = SharedMemoryTransport("reading", path.parent), WeightReader(0.1)
            try:
                async with reader.open(manifest, transport.fetch(manifest)):
                    pass
            except WeightsError as error:
                print(error)

        asyncio.run(main(Path(sys.argv[1])))
    """)
    child = subprocess.run(
        [sys.executable, "-c", program, str(fifo)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (child.returncode, child.stderr) == (0, "")
    assert child.stdout == f"version 1 could not be read within 0.1 s from shm:{tmp_path}: the share may hang\n"
