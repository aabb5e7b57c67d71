"""An object with asynchronous methods in a process of its own, called over a pipe.

Invariant: what a method raises is raised by `call`.
"""

import asyncio
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from offbeat.benchmarks.harness.child_process import Child


class ActorObject(Protocol):
    """What a servant's process holds; made in the parent, started in the child."""

    async def start(self) -> None: ...

    def close(self) -> None: ...


class ProcessActor(Child):
    """The parent's end."""

    def __init__(self, served: ActorObject, log: Path) -> None:
        """log: where the process's output goes."""
        super().__init__(_serve, (served,), log=log, goodbye=None)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method and wait for what it returns."""
        return self._ask((method, args))


async def _serve(pipe: Connection, served: Any) -> None:
    await served.start()
    pipe.send(None)
    try:
        while (message := await asyncio.to_thread(pipe.recv)) is not None:
            method, args = message
            pipe.send(await getattr(served, method)(*args))
    finally:
        served.close()
