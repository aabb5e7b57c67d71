"""Child process, driven over a pipe.

Invariants: it ends with its parent; its exceptions are raised there; a crash is raised by the next call, or at exit.
"""

import multiprocessing
import os
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from offbeat.benchmarks.harness import event_loop
from offbeat.services.process import die_with_parent

END_S = 20.0
NUM_LOG_LINES = 3
Serve = Callable[..., Coroutine[Any, Any, None]]
"""(child's end of the pipe, arguments): a module's function, for pickling."""


class Child:
    def __init__(self, serve: Serve, arguments: tuple[Any, ...], *, log: Path, goodbye: Any) -> None:
        """goodbye: message that ends the process."""
        context = multiprocessing.get_context("spawn")
        self._pipe, self._theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(self._theirs, log, serve, arguments), daemon=False)
        self._log = log
        self._goodbye = goodbye

    def __enter__(self) -> Self:
        self._process.start()
        self._theirs.close()
        try:
            self._answer()
        except BaseException:  # Ctrl-C while it starts: `with` would not end it
            self._process.kill()
            self._process.join()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                self._send(self._goodbye)
            else:
                self._process.terminate()
            self._process.join(END_S)
            # The message may have been sent in the moment of its death.
            if kind is None and self._process.exitcode:
                raise RuntimeError(self._crash_message())
        finally:
            if self._process.is_alive():
                self._process.kill()
            self._process.join()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "use `with`"
        return self._process.pid

    def check(self) -> None:
        """Raise the child's failure; no reply may be pending."""
        if self._pipe.poll():
            self._answer()

    def _ask(self, message: Any) -> Any:
        self._send(message)
        return self._answer()

    def _send(self, message: Any) -> None:
        try:
            self._pipe.send(message)
        except (BrokenPipeError, ConnectionResetError):
            # Typer takes a broken pipe for `| head` and ends without a word: what the process said last is raised instead
            while True:
                self._answer()

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError(self._crash_message()) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _crash_message(self) -> str:
        self._process.join(END_S)
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        output = "".join(f"\n{line}" for line in lines[-NUM_LOG_LINES:])
        return f"a process of the benchmark ended with code {self._process.exitcode}{output}"


def _main(pipe: Connection, log: Path, serve: Serve, arguments: tuple[Any, ...]) -> None:
    parent = multiprocessing.parent_process()
    die_with_parent(parent.pid if parent is not None else None)
    _redirect_output(log)
    try:
        event_loop.run(serve(pipe, *arguments))
    except EOFError:
        return  # the parent is gone
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
        raise


def _redirect_output(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
