"""An engine and a broker that do what a test says, when it says so."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from offbeat.services.errors import RetryableError, WeightsError
from offbeat.services.generation.engine import KvLoad, LoadTimes, SessionCounts
from offbeat.services.messages.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Manifest,
    VersionSpan,
)
from offbeat.services.weights.api import IDLE
from offbeat.services.weights.replica_reports import ReplicaLoad


def manifest(version: int) -> Manifest:
    return Manifest("run", version, version, 1, "fake", f"v{version}", "digest", 1, (), 0.0)


class FakeEngine:
    """Answers a request once the test finishes it, with the version that is loaded at its first token."""

    def __init__(self) -> None:
        self.version = -1
        self.loads: list[int] = []
        self.paths: list[Path] = []
        self.handed_in: list[tuple[str, int]] = []
        self.asked: dict[str, asyncio.Future[VersionSpan | None]] = {}
        self.sampled: dict[str, tuple[int, ...]] = {}
        """Tokens so far of requests that are aborted."""
        self.num_early_aborts = 0
        """Calls of `abort` to come that find no request yet."""
        self.given_up: list[str] = []
        self.staged: list[Path] = []
        self.may_stage = asyncio.Event()
        self.may_stage.set()
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.sessions = SessionCounts()
        self.kv = KvLoad()
        self.load_error: Exception | None = None
        self.dead = False
        self.is_asleep = False
        self.sleep_error: Exception | None = None
        self.note: Callable[[str], None] = lambda _: None
        """Receives what happens to the engine, in order."""

    async def generate(self, request: GenerateRequest, version: int) -> Completion:
        if self.dead:
            raise RetryableError("the engine died")
        assert not self.is_asleep
        self.handed_in.append((request.request_id, version))
        answer = asyncio.get_running_loop().create_future()
        self.asked[request.request_id] = answer
        try:
            span = await answer
        except asyncio.CancelledError:
            self.given_up.append(request.request_id)
            raise
        tokens = self.sampled.pop(request.request_id, ())
        if span is not None:
            return Completion(request.request_id, (7,), (-0.5,), (span,), cached_tokens=len(request.prompt) // 2)
        spans = (VersionSpan(0, len(tokens), self.version),) if tokens else ()
        return Completion(request.request_id, tokens, (-0.5,) * len(tokens), spans, FinishReason.ABORT)

    def finish(self, *request_ids: str, version: int | None = None) -> None:
        for request_id in request_ids:
            self.asked.pop(request_id).set_result(VersionSpan(0, 1, self.version if version is None else version))

    async def stage(self, path: Path) -> None:
        self.staged.append(path)
        await self.may_stage.wait()

    async def load(self, path: Path, version: int) -> LoadTimes:
        assert self.staged[-1] == path
        assert not self.is_asleep
        await self.may_load.wait()
        self.note(f"weights {version}")
        if self.load_error is not None:
            raise self.load_error
        self.version = version
        self.loads.append(version)
        self.paths.append(path)
        return LoadTimes(pause_s=0.02, load_s=0.01)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.num_early_aborts -= 1
        if self.num_early_aborts < 0:
            for request_id in self.asked.keys() & set(request_ids):
                self.asked.pop(request_id).set_result(None)

    async def sleep(self) -> None:
        assert not self.asked, "no request runs"
        if self.sleep_error is not None:
            raise self.sleep_error
        self.is_asleep = True
        self.note("sleep")

    async def wake(self) -> None:
        self.is_asleep = False
        self.note("wake")

    def session_counts(self) -> SessionCounts:
        return self.sessions

    def kv_load(self) -> KvLoad:
        return self.kv

    async def check(self) -> None:
        if self.dead:
            raise RetryableError("the engine died")

    def close(self) -> None:
        self.dead = True


class FakeBroker:
    """A `WeightSubscriber` over a list."""

    def __init__(self) -> None:
        self.published: list[Manifest] = []
        self.damaged: set[int] = set()
        self.unreachable = False
        self.lost_reports = 0
        """Reports that are not answered from now on."""
        self.refusals = 0
        self.reports: list[tuple[str, int]] = []
        self.loads: list[ReplicaLoad] = []
        self._rang = asyncio.Condition()

    async def publish(self, version: int) -> None:
        async with self._rang:
            self.published.append(manifest(version))
            self._rang.notify_all()

    async def newest(self) -> Manifest | None:
        return max(self.published, key=lambda m: m.version, default=None)

    async def wait_newer(self, version: int, timeout_s: float) -> Manifest | None:
        if self.unreachable:
            self.refusals += 1
            raise RetryableError("Redis does not answer")
        try:
            async with asyncio.timeout(timeout_s), self._rang:
                await self._rang.wait_for(lambda: any(m.version > version for m in self.published))
        except TimeoutError:
            return None
        return await self.newest()

    @asynccontextmanager
    async def fetch(self, manifest: Manifest) -> AsyncIterator[Path]:
        if manifest.version in self.damaged:
            self.refusals += 1
            raise WeightsError(f"version {manifest.version} is damaged")
        yield Path(manifest.location)

    async def report(self, replica_id: str, version: int, load: ReplicaLoad = IDLE) -> None:
        if self.lost_reports:
            self.lost_reports -= 1
            raise RetryableError("Redis does not answer")
        self.reports.append((replica_id, version))
        self.loads.append(load)

    async def retire(self, replica_id: str) -> None:
        self.reports.append((replica_id, -1))
