"""Reads of stored weights, which a hung share may block forever.

Invariants: a hung read blocks neither the event loop nor process exit (daemon thread), a version has one read at a
time, and at most `MAX_HUNG_READS` are abandoned. A read closes what it opened when it returns.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any, Generic, TypeVar

from offbeat.services.errors import WeightsError
from offbeat.services.messages.types import Manifest
from offbeat.services.weights.replica_reports import FetchState

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_HUNG_READS = 3
MIN_BYTES_PER_S = 100e6
"""Rate of a hung share."""
CLOSE_TIMEOUT_S = 10.0


class _AbandonedError(Exception):
    """Raised in a context whose caller has failed or left."""


class _Read(Generic[T]):
    """Context manager entered and exited in its own thread."""

    def __init__(self, manifest: Manifest, context: AbstractContextManager[T]) -> None:
        self.manifest = manifest
        self.since = time.time()
        self.entered: Future[T] = Future()
        self.ended: Future[None] = Future()
        for future in (self.entered, self.ended):
            future.set_running_or_notify_cancel()  # who stops waiting must not cancel what the thread will set
        self._leave: queue.SimpleQueue[bool] = queue.SimpleQueue()
        threading.Thread(target=self._work, args=(context,), name="weights", daemon=True).start()

    def leave(self, *, well: bool) -> None:
        """End the context, now or once it is entered."""
        self._leave.put(well)

    def _work(self, context: AbstractContextManager[T]) -> None:
        try:
            with context as value:
                self.entered.set_result(value)
                if not self._leave.get():
                    raise _AbandonedError
        except _AbandonedError:
            self.ended.set_result(None)
        except BaseException as error:
            (self.ended if self.entered.done() else self.entered).set_exception(error)
            if not self.ended.done():
                self.ended.set_result(None)
        else:
            self.ended.set_result(None)


class WeightReader:
    """Reads of one subscriber: one at a time, besides hung ones."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._reads: list[_Read[Any]] = []

    async def call(self, call: Callable[[Manifest], T], manifest: Manifest) -> T:
        """Return `call(manifest)`; raises its errors and those of `open`."""
        async with self.open(manifest, _call(call, manifest)) as result:
            return result

    @asynccontextmanager
    async def open(
        self, manifest: Manifest, context: AbstractContextManager[T], num_bytes: int = 0
    ) -> AsyncIterator[T]:
        """Enter a transport's context in a thread; leave it with the caller's error, if any.

        Raises:
            WeightsError: not entered in time, or too many earlier reads hang.
        """
        await self._wait_for_room()
        read = _Read(manifest, context)
        self._reads.append(read)
        well = False
        try:
            limit_s = self._timeout_s + num_bytes / MIN_BYTES_PER_S
            if not await _any_done([read.entered], limit_s):
                raise WeightsError(
                    f"version {manifest.version} could not be read within {limit_s:g} s from {describe_source(manifest)}: "
                    "the share may hang"
                )
            yield read.entered.result()
            well = True
        finally:
            read.leave(well=well)
            if read.entered.done() and not await _any_done([read.ended], CLOSE_TIMEOUT_S):
                logger.warning("version %d could not be closed within %g s", manifest.version, CLOSE_TIMEOUT_S)
        if read.ended.done():
            read.ended.result()

    def hangs(self, version: int) -> bool:
        """Return whether a read of this version hangs."""
        return any(read.manifest.version == version for read in self._under_way())

    def fetching(self, newer_than: int) -> FetchState | None:
        """Return the longest read in progress among newer versions."""
        reads = [each for each in self._under_way() if each.manifest.version > newer_than and not each.entered.done()]
        oldest = min(reads, key=lambda each: each.since, default=None)
        return oldest and FetchState(oldest.manifest.version, oldest.since, describe_source(oldest.manifest))

    def _under_way(self) -> "list[_Read[Any]]":
        self._reads = [read for read in self._reads if not read.ended.done()]
        return self._reads

    async def _wait_for_room(self) -> None:
        hung = self._under_way()
        if len(hung) < MAX_HUNG_READS:
            return
        if not await _any_done([read.ended for read in hung], self._timeout_s):
            raise WeightsError(
                f"{len(hung)} reads of weights from {describe_source(hung[0].manifest)} hang: nothing more is tried there"
            )


def describe_source(manifest: Manifest) -> str:
    return f"{manifest.transport}:{manifest.location.rpartition('/')[0]}"


@contextmanager
def _call(call: Callable[[Manifest], T], manifest: Manifest) -> Iterator[T]:
    yield call(manifest)


async def _any_done(futures: "Sequence[Future[Any]]", timeout_s: float) -> bool:
    waits = [asyncio.wrap_future(future) for future in futures]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()  # else asyncio logs a result that was never retrieved, or a closed loop
    return any(future.done() for future in futures)
