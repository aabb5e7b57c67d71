"""Daemon threads for calls that may hang, and for following Redis streams.

Invariants: at most `num_threads` calls run, hung ones excepted; a hung call blocks neither other calls nor the event
loop nor process exit.
"""

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self, TypeVar

T = TypeVar("T")


class HungError(Exception):
    """A call timed out; its thread is abandoned."""


class _Thread:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.calls: queue.SimpleQueue[tuple[Callable[[], Any], Callable[..., None]] | None] = queue.SimpleQueue()
        self.hung = False
        threading.Thread(target=self._work, name="daemon-thread", daemon=True).start()

    def _work(self) -> None:
        while (item := self.calls.get()) is not None:
            call, report = item
            result: Any = None
            error: BaseException | None = None
            try:
                result = call()
            except BaseException as raised:
                error = raised
            try:
                self._loop.call_soon_threadsafe(report, self, result, error)
            except RuntimeError:
                return  # the loop is closed: no caller waits for this


class DaemonThreads:
    """Thread pool that replaces hung threads."""

    def __init__(self, num_threads: int) -> None:
        self._slots = asyncio.Semaphore(num_threads)
        self._idle: list[_Thread] = []
        self._closed = False
        self.num_hung = 0
        """Abandoned threads whose call has not returned."""

    async def run(self, call: Callable[[], T], timeout_s: float, on_start: Callable[[], None] | None = None) -> T:
        """Run `call` in a thread; the timeout starts when a thread is free.

        A cancelled caller leaves the call running. on_start: called on the loop when the call gets a thread.

        Raises:
            HungError: no return within `timeout_s`.
        """
        await self._slots.acquire()
        loop = asyncio.get_running_loop()
        thread = self._idle.pop() if self._idle else _Thread(loop)
        future: asyncio.Future[T] = loop.create_future()
        timer = loop.call_later(timeout_s, self._give_up, thread, future)

        def report(thread: _Thread, result: T, error: BaseException | None) -> None:
            timer.cancel()
            self._take_back(thread)
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                # A future refuses StopIteration, and SystemExit would end the loop.
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

        if on_start:
            on_start()
        thread.calls.put((call, report))
        return await future

    def close(self) -> None:
        """End idle threads, and busy ones after their call."""
        self._closed = True
        while self._idle:
            self._idle.pop().calls.put(None)

    def _give_up(self, thread: _Thread, future: "asyncio.Future[Any]") -> None:
        thread.hung = True
        self.num_hung += 1
        self._slots.release()
        if not future.done():
            future.set_exception(HungError())

    def _take_back(self, thread: _Thread) -> None:
        if thread.hung:
            self.num_hung -= 1
        else:
            self._slots.release()
        if thread.hung or self._closed:
            thread.calls.put(None)
        else:
            self._idle.append(thread)


FINAL_ROUND_TIMEOUT_S = 10.0


class Follower(ABC):
    """Thread that follows a Redis stream; on exit it processes the rest."""

    def __init__(self, name: str) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=FINAL_ROUND_TIMEOUT_S)

    @abstractmethod
    def _follow(self) -> None:
        """Read until `_stop` is set and nothing is left."""
