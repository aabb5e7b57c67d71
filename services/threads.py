"""Daemon threads: for calls that may never return, and for following a Redis stream in the background.

Invariants: at most `num_threads` calls run at a time, not counting hung ones; a hung call blocks neither other calls,
nor the event loop, nor process exit. Everything but the calls themselves happens on the event loop.
"""

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self, TypeVar

T = TypeVar("T")


class HungError(Exception):
    """A call did not return in time; its thread is left behind."""


class _Thread:
    """One thread that takes calls from a queue; None ends it."""

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
    """A pool of threads whose hung members are replaced."""

    def __init__(self, num_threads: int) -> None:
        self._slots = asyncio.Semaphore(num_threads)
        self._idle: list[_Thread] = []
        self._closed = False
        self.num_hung = 0
        """Threads left behind whose call has not returned to this moment."""

    async def run(self, call: Callable[[], T], timeout_s: float, on_start: Callable[[], None] | None = None) -> T:
        """Run `call` in a thread; the time counts from when a thread is free. Raises what it raises.

        A caller that is cancelled leaves the call running; its thread counts as busy until it returns or hangs. `on_start`
        is called on the loop when the call is handed to a thread, from when on it will run.

        Raises:
            HungError: it did not return within `timeout_s`.
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
        """End idle threads, and busy ones when they return."""
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
    """Background thread that tails one of the run's Redis streams; at the end of its context it processes what has
    arrived by then."""

    def __init__(self, name: str) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Write what is in the stream by now, then end."""
        self._stop.set()
        self._thread.join(timeout=FINAL_ROUND_TIMEOUT_S)

    @abstractmethod
    def _follow(self) -> None:
        """Read until `_stop` is set and nothing is left."""
