"""An object with asynchronous methods in a process of its own, called over a pipe.

Invariant: the process ends with its parent; what a method raises is raised by `call`.
"""

import asyncio
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from deploy.bench import loops
from deploy.bench.rollouts import quiet


class Served(Protocol):
    """What a servant's process holds; made in the parent, started in the child."""

    async def start(self) -> None: ...

    def close(self) -> None: ...


class Servant:
    """The parent's end."""

    def __init__(self, served: Served, log: Path) -> None:
        """log: where the process's output goes."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs, served, log))
        self._theirs = theirs

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
        if kind is None:
            self._pipe.send(None)
        else:
            self._process.terminate()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def call(self, method: str, *args: Any) -> Any:
        """Call a method and wait for what it returns."""
        self._pipe.send((method, args))
        return self._answer()

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"the process ended with code {self._process.exitcode}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _main(pipe: Connection, served: Served, log: Path) -> None:
    quiet(log)
    try:
        loops.run(_serve(pipe, served))
    except EOFError:
        return  # the parent is gone
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
        raise


async def _serve(pipe: Connection, served: Any) -> None:
    await served.start()
    pipe.send(None)
    try:
        while (message := await asyncio.to_thread(pipe.recv)) is not None:
            method, args = message
            pipe.send(await getattr(served, method)(*args))
    finally:
        served.close()
