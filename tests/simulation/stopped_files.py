"""A learner's file operations, of which the n-th kills or pauses it."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path
from typing import Any

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.listdir", "os.scandir")


class KilledError(BaseException):
    """Death of a process, which no `except Exception` may survive."""


class InlineExecutor(Executor):
    """Background work done at once, in the caller's thread, so that a seed fixes the order of file operations."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class _Stopper(threading.local):
    """Stop of the current thread: operations left, and the action at each further one."""

    left = 0
    folder = ""
    stop: Callable[[], None] | None = None


_stopper = _Stopper()


def _observe(event: str, arguments: tuple[object, ...]) -> None:
    stop = _stopper.stop
    if stop is None or event not in EVENTS or not str(arguments[0]).startswith(_stopper.folder):
        return
    _stopper.left -= 1
    if _stopper.left < 0:
        stop()


sys.addaudithook(_observe)


def _run(action: Callable[[], object], folder: Path, before: int, stop: Callable[[], None]) -> None:
    _stopper.left, _stopper.folder, _stopper.stop = before, str(folder), stop
    try:
        action()
    finally:
        _stopper.stop = None


def at_each(action: Callable[[], object], folder: Path, act: Callable[[], None]) -> None:
    """Run an action; call `act` before each of its file operations in `folder`."""
    _run(action, folder, 0, act)


def kill_at(action: Callable[[], object], folder: Path, before: int) -> None:
    """Run an action whose process is killed after `before` file operations, if it has more."""

    def stop() -> None:
        raise KilledError

    with suppress(KilledError):
        _run(action, folder, before, stop)


class Paused:
    """An action of a process that is paused after `before` file operations, if it has more."""

    def __init__(self, action: Callable[[], object], folder: Path, before: int) -> None:
        self.error: Exception | None = None
        self._has_stopped, self._may_continue = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, args=(action, folder, before), daemon=True)
        self._thread.start()
        self._has_stopped.wait()

    def _work(self, action: Callable[[], object], folder: Path, before: int) -> None:
        try:
            _run(action, folder, before, self._stop)
        except Exception as error:
            self.error = error
        finally:
            self._has_stopped.set()

    def _stop(self) -> None:
        self._has_stopped.set()
        self._may_continue.wait()

    def wake(self) -> Exception | None:
        """Let it end; return its error."""
        self._may_continue.set()
        self._thread.join()
        return self.error
